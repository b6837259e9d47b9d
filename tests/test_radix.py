"""The radix tree by itself: literal trees, counts, and 100,000 random operations against a brute-force dictionary."""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest

from tests.copies import copies
from tests.radix_model import Dictionary, Prefix

SEEDS, OPERATIONS = 100, 1000


@pytest.fixture(params=copies("radix.py"))
def new_tree(request: pytest.FixtureRequest) -> Any:
    """new_tree(page_size): an empty tree."""
    return importlib.import_module(f"{request.param}.radix").RadixTree


def edges(tree: Any, node: Any = None) -> dict[tuple[int, ...], Any]:
    """The tree as nested literals: {tokens of an edge: (pages, locks, edges below)}."""
    children = (node or tree.root).children.values()
    return {tuple(child.tokens): (child.pages, child.locks, edges(tree, child)) for child in children}


# ---- small trees


def test_an_empty_tree_has_nothing(new_tree: Any) -> None:
    tree = new_tree(2)
    assert tree.match([1, 2, 3, 4], 4) == 0 and tree.evict(5) == [] and tree.flush() == []
    node, pages = tree.lock([1, 2], 2)
    assert node is tree.root and pages == []
    tree.unlock(node)
    tree.check()


def test_prefixes_are_found_in_whole_pages_and_never_beyond_the_limit(new_tree: Any) -> None:
    tree = new_tree(2)
    assert tree.insert([1, 2, 3, 4, 5, 6], [10, 11, 12]) == []
    assert edges(tree) == {(1, 2, 3, 4, 5, 6): ([10, 11, 12], 0, {})}
    found = [tree.match([1, 2, 3, 4, 5, 6, 7], limit) for limit in range(8)]
    assert found == [0, 0, 2, 2, 4, 4, 6, 6]
    assert tree.match([1, 2, 3, 9, 5, 6], 6) == 2, "the second page differs in its second token"
    assert tree.match([9, 2, 3, 4], 4) == 0


def test_an_edge_is_cut_where_two_prefixes_part(new_tree: Any) -> None:
    tree = new_tree(2)
    tree.insert([1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert tree.insert([1, 2, 3, 4, 7, 8], [10, 11, 20]) == []
    assert edges(tree) == {(1, 2, 3, 4): ([10, 11], 0, {(5, 6): ([12], 0, {}), (7, 8): ([20], 0, {})})}
    assert tree.pages == 4 and tree.evictable == 4


def test_pages_of_a_second_computation_are_named_and_stay_the_callers(new_tree: Any) -> None:
    tree = new_tree(2)
    tree.insert([1, 2, 3, 4], [10, 11])
    assert tree.insert([1, 2, 3, 4, 5, 6], [20, 11, 22]) == [(0, 20, 10)]
    assert edges(tree) == {(1, 2, 3, 4): ([10, 11], 0, {(5, 6): ([22], 0, {})})}


def test_a_lock_protects_the_way_to_the_root_and_cuts_at_its_end(new_tree: Any) -> None:
    tree = new_tree(2)
    tree.insert([1, 2, 3, 4, 5, 6], [10, 11, 12])
    node, pages = tree.lock([1, 2, 3, 4, 9, 9], 6)
    assert pages == [10, 11] and (tree.protected, tree.evictable) == (2, 1)
    assert edges(tree) == {(1, 2, 3, 4): ([10, 11], 1, {(5, 6): ([12], 0, {})})}
    assert tree.flush() == [12]
    tree.unlock(node)
    assert tree.flush() == [11, 10] and edges(tree) == {}


def test_a_node_that_is_held_stands_for_the_same_prefix_after_a_split(new_tree: Any) -> None:
    tree = new_tree(1)
    tree.insert([1, 2, 3, 4], [10, 11, 12, 13])
    held, pages = tree.lock([1, 2, 3, 4], 4)
    other, shorter = tree.lock([1, 2], 2)
    assert pages == [10, 11, 12, 13] and shorter == [10, 11] and held is not other
    assert edges(tree) == {(1, 2): ([10, 11], 2, {(3, 4): ([12, 13], 1, {})})}
    tree.unlock(held)
    assert edges(tree) == {(1, 2): ([10, 11], 1, {(3, 4): ([12, 13], 0, {})})}
    tree.unlock(other)
    tree.check()
    assert tree.evictable == 4


def test_the_least_recently_used_end_goes_first_and_only_as_far_as_needed(new_tree: Any) -> None:
    tree = new_tree(1)
    tree.insert([1, 2, 3], [10, 11, 12])
    tree.insert([1, 5, 6], [10, 21, 22])
    tree.match([1, 2, 3], 3)
    assert tree.evict(1) == [22], "the other branch has been used since"
    assert tree.evict(2) == [21, 12]
    assert tree.evict(9) == [11, 10] and tree.pages == 0


def test_eviction_stops_at_what_is_locked(new_tree: Any) -> None:
    tree = new_tree(1)
    tree.insert([1, 2, 3], [10, 11, 12])
    tree.insert([7, 8], [20, 21])
    tree.lock([1, 2], 2)
    assert tree.evict(99) == [21, 20, 12]
    assert edges(tree) == {(1, 2): ([10, 11], 1, {})}


# ---- how much work


def test_the_heap_holds_each_node_once_however_often_it_is_used(new_tree: Any) -> None:
    tree = new_tree(1)
    for branch in range(50):
        tree.insert([branch, 1], [2 * branch, 2 * branch + 1])
    for _ in range(20):
        for branch in range(50):
            node, _ = tree.lock([branch, 1], 2)
            tree.unlock(node)
    assert len(tree._heap) == 50


def steps_per_page(tree: Any, nodes: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Heap operations per evicted page of a tree of so many leaves, each of them used once since it came."""
    import heapq

    calls = [0]
    for name in ("heappush", "heappop"):
        kept = getattr(heapq, name)

        def counted(*args: Any, kept: Any = kept) -> Any:
            calls[0] += 1
            return kept(*args)

        monkeypatch.setattr(heapq, name, counted)
    for leaf in range(nodes):
        tree.insert([leaf % 97, leaf], [10 * nodes + leaf % 97, leaf])
    for leaf in range(nodes):
        tree.match([leaf % 97, leaf], 2)
    calls[0] = 0
    pages = sum(len(tree.evict(1)) for _ in range(nodes // 2))
    monkeypatch.undo()
    assert pages == nodes // 2
    return calls[0] / pages


def test_evicting_a_page_takes_as_many_heap_operations_in_a_tree_of_any_size(
    new_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (steps_per_page(new_tree(1), nodes, monkeypatch) for nodes in (1_000, 20_000))
    assert many == pytest.approx(few, rel=0.05)
    assert many < 6, "each entry is put right once, and taken once"


# ---- random operations


def play(new_tree: Any, seed: int, operations: int) -> dict[str, int]:
    """Random operations on a tree and on the dictionary; both must say the same. Returns what happened how often."""
    rng = random.Random(seed)
    size = rng.choice((1, 2, 4))
    tree, model = new_tree(size), Dictionary(size)
    free = list(range(rng.choice((12, 40, 80))))
    held: list[tuple[Any, Prefix]] = []
    seen = dict.fromkeys(("hits", "doubles", "evicted", "locked", "partial"), 0)
    kinds, weights = ("match", "insert", "lock", "unlock", "evict", "flush"), (20, 40, 14, 16, 12, 1)
    for kind in rng.choices(kinds, weights, k=operations):
        tokens = some_tokens(rng, model)
        limit = rng.randint(0, len(tokens) + 2)
        if kind == "match":
            cut = len(model.ends)
            found = tree.match(tokens, limit)
            assert found == len(model.use(tokens, limit)) and cut == len(model.ends)
            seen["hits"] += found > 0
        elif kind == "insert":
            insert(rng, tree, model, free, tokens[: len(tokens) // size * size], seen)
        elif kind == "lock":
            (node, pages), (prefix, expected) = tree.lock(tokens, limit), model.lock(tokens, limit)
            assert pages == expected
            held.append((node, prefix))
            seen["locked"] += len(pages)
        elif kind == "unlock" and held:
            node, prefix = held.pop(rng.randrange(len(held)))
            tree.unlock(node)
            model.unlock(prefix)
        elif kind in ("evict", "flush"):
            free += evict(tree, model, None if kind == "flush" else rng.randint(0, 6), seen)
        model.compare(tree)
    for node, prefix in held:
        tree.unlock(node)
        model.unlock(prefix)
    free += evict(tree, model, None, seen)
    assert tree.pages == 0 and len(free) == len(set(free))
    return seen


def some_tokens(rng: random.Random, model: Dictionary) -> list[int]:
    """Mostly the beginning of something cached, and then something else: few different tokens, so that paths meet."""
    known = rng.choice(sorted(model.ends)) if model.ends and rng.random() < 0.7 else ()
    start = list(known[: rng.randint(0, len(known))])
    return start + [rng.randrange(3) for _ in range(rng.randint(0, 5 * model.size))]


def insert(
    rng: random.Random, tree: Any, model: Dictionary, free: list[int], tokens: list[int], seen: dict[str, int]
) -> None:
    """As a request does that has computed the tokens: its pages are the tree's own as far as it found them, or doubles."""
    count = len(tokens) // model.size
    if count > len(free):
        free += evict(tree, model, count - len(free), seen)
    known = [model.page[prefix] for prefix in model.cuts(tokens) if prefix in model.page]
    shared = rng.randint(0, len(known))
    if count - shared > len(free):
        return
    own = [free.pop() for _ in range(count - shared)]
    pages = known[:shared] + own
    doubles = tree.insert(tokens, pages)
    assert doubles == model.insert(tokens, pages)
    free += [page for _, page, _ in doubles]
    seen["doubles"] += len(doubles)


def evict(tree: Any, model: Dictionary, count: int | None, seen: dict[str, int]) -> list[int]:
    """count None: flush."""
    possible = tree.evictable
    freed = tree.flush() if count is None else tree.evict(count)
    assert freed == model.evict(possible if count is None else count)
    assert len(freed) == (possible if count is None else min(count, possible))
    seen["evicted"] += len(freed)
    seen["partial"] += tree.pages > 0 and bool(freed)
    return freed


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_say_what_a_dictionary_says(new_tree: Any, seed: int) -> None:
    seen = play(new_tree, seed, OPERATIONS // 2)
    assert all(seen[what] > 20 for what in seen), f"some of it hardly ever happens: {seen}"


@pytest.mark.full
@pytest.mark.parametrize("block", range(10))
def test_a_hundred_thousand_random_operations(new_tree: Any, block: int) -> None:
    for seed in range(block * SEEDS // 10, (block + 1) * SEEDS // 10):
        play(new_tree, seed, OPERATIONS)
