"""A radix tree from token ids to KV pages: which prefixes are computed, who uses them, which go first (Zheng et al. 2024)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Node:
    """An edge of the tree with what lies at its end: ``tokens`` after those of the parent, in ``pages``.

    len(tokens) == len(pages) * page_size > 0, but for the root. ``locks`` counts the live requests whose prefix ends
    here or below; a node without locks has no locked child.
    """

    tokens: list[int]
    pages: list[int]
    parent: Node | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)  # by the tokens of the child's first page
    locks: int = 0
    used_at: int = 0  # of the tree's clock; who uses the beginning of an edge uses all of it
    offered: bool = False  # has an entry in the heap


class RadixTree:
    """Owns the pages that are in it. Requests lock the node their prefix ends at; what is not locked may be evicted.

    A Node that someone holds stays valid: a split puts the upper part into another Node, and the held one keeps
    standing for the same prefix.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = Node([], [], None)
        self.pages = 0  # in the tree
        self.protected = 0  # of these, locked
        self._clock = itertools.count(1)
        # Leaves without locks, oldest first: (used_at, tie-breaker, node), one entry per node at most. An entry whose
        # node has been used, locked or has got children since is put right, or dropped, when it comes to the top.
        self._heap: list[tuple[int, int, Node]] = []
        self._order = itertools.count()

    @property
    def evictable(self) -> int:
        """Pages that evict() could give back."""
        return self.pages - self.protected

    def match(self, tokens: Sequence[int], limit: int) -> int:
        """Length of the longest prefix of tokens[:limit] in the tree, in whole pages. Changes nothing but used_at."""
        return sum(length for _, length in self._walk(tokens, limit))

    def lock(self, tokens: Sequence[int], limit: int) -> tuple[Node, list[int]]:
        """Protect the longest prefix of tokens[:limit]; returns the node it ends at, and its pages in order."""
        node, pages = self.root, []
        for step, length in self._walk(tokens, limit):
            node = self._split(step, length) if length < len(step.tokens) else step
            pages += node.pages
        self._add_lock(node, 1)
        return node, pages

    def unlock(self, node: Node) -> None:
        """Take back one lock; what nobody protects any more becomes evictable."""
        self._add_lock(node, -1)

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> list[tuple[int, int, int]]:
        """Put a computed prefix into the tree, len(tokens) == len(pages) * page_size.

        The tree takes over the pages it did not have. Where it has the tokens already its own pages stay: returns
        (place in pages, given page, page of the tree) for each that differs; those given pages are still the caller's.
        """
        assert len(tokens) == len(pages) * self.page_size
        node, done, doubles = self.root, 0, []
        for step, length in self._walk(tokens, len(tokens)):
            node = self._split(step, length) if length < len(step.tokens) else step
            for page in node.pages:
                if pages[done] != page:
                    doubles.append((done, pages[done], page))
                done += 1
        if done < len(pages):
            start = done * self.page_size
            child = Node(list(tokens[start:]), list(pages[done:]), node, used_at=next(self._clock))
            node.children[self._key(child.tokens)] = child
            self.pages += len(child.pages)
            self._offer(child)
        return doubles

    def evict(self, count: int) -> list[int]:
        """Remove up to count pages, the least recently used first, from the ends of prefixes; they are the caller's."""
        freed: list[int] = []
        while len(freed) < count and self._heap:
            used_at, _, node = heapq.heappop(self._heap)
            node.offered = False
            if node.locks or node.children:
                continue
            if used_at != node.used_at:
                self._offer(node)
                continue
            parent = node.parent
            assert parent is not None
            take = min(count - len(freed), len(node.pages))
            freed += reversed(node.pages[-take:])
            first = self._key(node.tokens)
            del node.pages[-take:], node.tokens[-take * self.page_size :]
            if node.pages:
                self._offer(node)
            else:
                del parent.children[first]
                self._offer(parent)
        self.pages -= len(freed)
        return freed

    def flush(self) -> list[int]:
        """Evict everything that is not locked."""
        return self.evict(self.evictable)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents before children."""
        todo = list(self.root.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo += node.children.values()

    def check(self) -> None:
        """Assert the invariants; for tests and debugging."""
        nodes = list(self.nodes())
        pages = [page for node in nodes for page in node.pages]
        assert len(set(pages)) == len(pages) == self.pages, "a page is in the tree twice, or the count is wrong"
        assert sum(len(node.pages) for node in nodes if node.locks) == self.protected
        offered = {id(node) for _, _, node in self._heap}
        for node in nodes:
            assert node.pages and len(node.tokens) == len(node.pages) * self.page_size
            assert node.parent is not None and node.parent.children[self._key(node.tokens)] is node
            assert node.locks >= sum(child.locks for child in node.children.values()) >= 0
            assert node.locks or node.children or id(node) in offered, "an evictable leaf is not in the heap"

    def _key(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens[: self.page_size])

    def _walk(self, tokens: Sequence[int], limit: int) -> Iterator[tuple[Node, int]]:
        """The nodes along tokens[:limit] with how many of their tokens agree, in whole pages; refreshes used_at."""
        size, at, node = self.page_size, 0, self.root
        now = next(self._clock)
        while limit - at >= size:
            child = node.children.get(tuple(tokens[at : at + size]))
            if child is None:
                return
            most = min(len(child.tokens), (limit - at) // size * size)
            length = size
            while length < most and child.tokens[length : length + size] == list(
                tokens[at + length : at + length + size]
            ):
                length += size
            child.used_at = now
            whole = length == len(child.tokens)  # asked here, because who gets the node may split it
            yield child, length
            if not whole:
                return
            node, at = child, at + length

    def _split(self, node: Node, length: int) -> Node:
        """Cut node after ``length`` of its tokens; returns the upper part, a Node of its own with the same locks."""
        assert node.parent is not None and 0 < length < len(node.tokens) and length % self.page_size == 0
        count = length // self.page_size
        upper = Node(node.tokens[:length], node.pages[:count], node.parent, locks=node.locks, used_at=node.used_at)
        node.parent.children[self._key(upper.tokens)] = upper
        del node.tokens[:length], node.pages[:count]
        node.parent = upper
        upper.children[self._key(node.tokens)] = node
        return upper

    def _add_lock(self, node: Node, change: int) -> None:
        at: Node | None = node
        while at is not None:
            if at.locks == 0 or at.locks + change == 0:
                self.protected += len(at.pages) * change
            at.locks += change
            assert at.locks >= 0
            self._offer(at)
            at = at.parent

    def _offer(self, node: Node) -> None:
        """Put node into the heap if it could be evicted as it is."""
        if node is not self.root and not (node.locks or node.children or node.offered):
            node.offered = True
            heapq.heappush(self._heap, (node.used_at, next(self._order), node))
