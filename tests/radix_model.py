"""A prefix cache by brute force: one dictionary entry per cached page, under all the tokens up to its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

Prefix = tuple[int, ...]  # whole pages of tokens, from the first one on


class Dictionary:
    """What a radix tree must answer. Every question looks at every entry.

    ``ends`` are the prefixes at which an edge ends: a use refreshes whole edges, and an edge is evicted as one.
    """

    def __init__(self, page_size: int) -> None:
        self.size = page_size
        self.page: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.locks: Counter[Prefix] = Counter()  # by page: the locks on it or on a longer prefix
        self.ends: set[Prefix] = set()
        self.now = 0

    @property
    def protected(self) -> int:
        return sum(1 for prefix in self.page if self.locks[prefix])

    def cuts(self, prefix: Sequence[int]) -> Iterator[Prefix]:
        """Every prefix of it in whole pages, the shortest first."""
        for end in range(self.size, len(prefix) + 1, self.size):
            yield tuple(prefix[:end])

    def longer(self, prefix: Prefix) -> list[Prefix]:
        """The cached prefixes that go on for one page more."""
        return [p for p in self.page if p[: -self.size] == prefix]

    def use(self, tokens: Sequence[int], limit: int) -> Prefix:
        """The longest cached prefix of tokens[:limit]; the edges on the way become the last used."""
        self.now += 1
        found: Prefix = ()
        for prefix in self.cuts(tokens[:limit]):
            if prefix not in self.page:
                break
            self.used[prefix] = self.now
            found = prefix
        rest = found
        while rest and rest not in self.ends:
            [rest] = self.longer(rest)
            self.used[rest] = self.now
        return found

    def lock(self, tokens: Sequence[int], limit: int) -> tuple[Prefix, list[int]]:
        found = self.use(tokens, limit)
        self.ends |= {found} - {()}
        self.locks.update(self.cuts(found))
        return found, [self.page[prefix] for prefix in self.cuts(found)]

    def unlock(self, prefix: Prefix) -> None:
        self.locks.subtract(self.cuts(prefix))

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> list[tuple[int, int, int]]:
        found = self.use(tokens, len(tokens))
        self.ends |= {found} - {()}
        doubles = []
        if len(found) < len(tokens):
            self.now += 1
            self.ends.add(tuple(tokens))
        for place, (prefix, page) in enumerate(zip(self.cuts(tokens), pages, strict=True)):
            if len(prefix) > len(found):
                self.page[prefix], self.used[prefix] = page, self.now
            elif self.page[prefix] != page:
                doubles.append((place, page, self.page[prefix]))
        return doubles

    def evict(self, count: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < count:
            parents = {prefix[: -self.size] for prefix in self.page}
            leaves = [end for end in self.ends if end not in parents and not self.locks[end]]
            if not leaves:
                break
            victim = min(leaves, key=self.used.__getitem__)
            self.ends.remove(victim)
            while victim and victim not in self.ends and len(freed) < count:
                freed.append(self.page.pop(victim))
                del self.used[victim]
                victim = victim[: -self.size]
            self.ends |= {victim} - {()}
        return freed

    def compare(self, tree: Any) -> None:
        """The tree holds these pages, cut into these edges, and counts them rightly."""
        tree.check()
        page: dict[Prefix, int] = {}
        used: dict[Prefix, int] = {}
        ends: dict[int, Prefix] = {id(tree.root): ()}
        for node in tree.nodes():
            start = ends[id(node.parent)]
            ends[id(node)] = (*start, *node.tokens)
            for place, number in enumerate(node.pages, start=1):
                prefix = (*start, *node.tokens[: place * self.size])
                page[prefix], used[prefix] = number, node.used_at
        assert page == self.page and used == self.used
        assert set(ends.values()) - {()} == self.ends, "edges are cut elsewhere"
        assert (tree.pages, tree.protected) == (len(self.page), self.protected)
        assert tree.evictable == len(self.page) - self.protected
