"""Which computed prefixes are kept, found by a radix tree over token ids.

An entry is a saved native sequence that holds the KV cells of all tokens on the way from the root
to its node; any beginning of it can be restored. Knows tokens, ids and sizes. Does not call the
engine: what it decides becomes commands of the next iteration.

With a shared pool an entry shares its cells with those it was extended from, so the tree's size
is the sum of its nodes; where short common beginnings were computed apart, each counts
(``doubles``), so that the size is never below the cells in use. With a cache per lane an entry is
a copy of its own (``copies``), so the size is the sum of the entries' lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

#: Shorter prefixes are not worth a native call.
PREFIX_TOKENS_MIN = 32


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens; the path from the root spells a prefix."""

    tokens: Sequence[int]
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    entry: Entry | None = None


@dataclass(slots=True, eq=False)
class Entry:
    """A saved prefix of ``length`` tokens; in use by ``users`` running requests.

    ``doubles`` of its cells may hold tokens that others on its path hold in cells of their own.
    """

    sequence_id: int
    node: Node
    length: int
    used_at: float
    users: int = 0
    doubles: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """The first ``length`` tokens of a prompt can be restored from ``entry``."""

    entry: Entry
    length: int


class PrefixCache:
    """At most ``entries_max`` prefixes and ``tokens_max`` tokens; sequence ids from ``first_id``.

    ``tokens_max`` 0 turns the cache off.
    """

    def __init__(
        self, tokens_max: int, *, first_id: int = 0, entries_max: int = 64, copies: bool = True
    ) -> None:
        self.tokens_max = tokens_max
        self.copies = copies
        self.tokens = 0
        self._roots: dict[str, Node] = {}
        self._entries: dict[int, Entry] = {}
        self._free_ids = list(range(first_id + entries_max - 1, first_id - 1, -1))

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def has_free_id(self) -> bool:
        return bool(self._free_ids)

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    # --- questions --------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], salt: str = "") -> Match | None:
        """The longest saved beginning of ``tokens``, leaving at least one token to compute."""
        root = self._roots.get(salt)
        if root is None:
            return None
        node, inside, length = self._walk(root, tokens)
        if inside:
            node = node.children[tokens[length - inside]]
        length = min(length, len(tokens) - 1)
        if length < PREFIX_TOKENS_MIN:
            return None
        return Match(self._any_entry(node), length)

    def _walk(self, root: Node, tokens: Sequence[int]) -> tuple[Node, int, int]:
        """The last whole node, how far the match goes into one of its children, its length."""
        node, length = root, 0
        while length < len(tokens):
            child = node.children.get(tokens[length])
            if child is None:
                break
            common = common_length(child.tokens, tokens[length : length + len(child.tokens)])
            if common < len(child.tokens):
                return node, common, length + common
            node, length = child, length + common
        return node, 0, length

    def _any_entry(self, node: Node) -> Entry:
        """Any entry at or below a node holds all tokens down to it."""
        while node.entry is None:
            node = next(iter(node.children.values()))
        return node.entry

    def victims(self, tokens: int, *, ids: int = 0) -> list[Entry]:
        """Least recently used entries whose eviction frees so many tokens (or ids), or fewer if
        there are no more; entries in use stay."""
        chosen: list[Entry] = []
        freed = 0
        gone: set[int] = set()
        waiting = sorted(self._entries.values(), key=lambda entry: entry.used_at)
        while freed < tokens or len(chosen) < ids:
            for entry in waiting:
                if not entry.users and (
                    self.copies or not self._has_entries_below(entry.node, gone)
                ):
                    break
            else:
                break
            waiting.remove(entry)  # an older one, extended by it, may be next
            chosen.append(entry)
            gone.add(entry.sequence_id)
            freed += self._freed_by(entry, gone)
        return chosen

    def _has_entries_below(self, node: Node, gone: set[int]) -> bool:
        return any(
            (child.entry is not None and child.entry.sequence_id not in gone)
            or self._has_entries_below(child, gone)
            for child in node.children.values()
        )

    def _freed_by(self, entry: Entry, gone: set[int]) -> int:
        if self.copies:
            return entry.length
        freed = entry.doubles
        node: Node | None = entry.node
        while node is not None and (node.entry is None or node.entry.sequence_id in gone):
            if self._has_entries_below(node, gone):
                break
            freed += len(node.tokens)
            node = node.parent
        return freed

    @property
    def evictable_tokens(self) -> int:
        """How many tokens eviction could free now."""
        if self.copies:
            return sum(entry.length for entry in self._entries.values() if not entry.users)
        held: set[int] = set()
        kept = 0
        for entry in self._entries.values():
            kept += entry.doubles if entry.users else 0
            node: Node | None = entry.node if entry.users else None
            while node is not None and id(node) not in held:
                held.add(id(node))
                kept += len(node.tokens)
                node = node.parent
        return self.tokens - kept

    # --- changes ----------------------------------------------------------------------------------

    def add(
        self,
        tokens: Sequence[int],
        now: float,
        salt: str = "",
        *,
        shared_tokens: int | None = None,
        doubles: int = 0,
    ) -> Entry | None:
        """Book a prefix as saved; None if it is known already or no sequence id is free.

        The first ``shared_tokens`` (None: all that are known) are in cells of an entry that has
        so many ``doubles``.
        """
        if not self._free_ids:
            return None
        root = self._roots.setdefault(salt, Node((), None))
        node, inside, length = self._walk(root, tokens)
        if inside:
            node = self._split(node.children[tokens[length - inside]], inside)
        if length < len(tokens):
            leaf = Node(tuple(tokens[length:]), node)
            node.children[tokens[length]] = leaf
            node = leaf
        elif node.entry is not None:
            return None
        entry = Entry(self._free_ids.pop(), node, len(tokens), now)
        if not self.copies:
            own = 0 if shared_tokens is None else max(0, length - shared_tokens)
            entry.doubles = doubles + own
            self.tokens += entry.doubles
        node.entry = entry
        self._entries[entry.sequence_id] = entry
        self.tokens += len(tokens) if self.copies else len(tokens) - length
        return entry

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two; returns the upper part."""
        assert node.parent is not None
        upper = Node(node.tokens[:at], node.parent)
        node.parent.children[node.tokens[0]] = upper
        node.tokens = node.tokens[at:]
        node.parent = upper
        upper.children[node.tokens[0]] = node
        return upper

    def remove(self, entry: Entry) -> None:
        """Forget an entry; its sequence has to be dropped natively."""
        assert not entry.users
        del self._entries[entry.sequence_id]
        self._free_ids.append(entry.sequence_id)
        node: Node | None = entry.node
        entry.node.entry = None
        self.tokens -= entry.length if self.copies else entry.doubles
        while node is not None and node.parent is not None:
            if node.entry is not None or node.children:
                break
            del node.parent.children[node.tokens[0]]
            if not self.copies:
                self.tokens -= len(node.tokens)
            node = node.parent

    def clear(self) -> None:
        """Forget all entries, also those in use: their cells are gone."""
        self._free_ids += self._entries
        self._entries.clear()
        self._roots.clear()
        self.tokens = 0

    def check(self) -> None:
        """Assert that the books agree with the tree."""
        total = 0
        stack = list(self._roots.values())
        seen: set[int] = set()
        while stack:
            node = stack.pop()
            if node.parent is not None:
                assert node.entry is not None or node.children, "a node without any entry below"
                total += len(node.tokens)
            if node.entry is not None:
                seen.add(node.entry.sequence_id)
            for first, child in node.children.items():
                assert child.parent is node
                assert child.tokens[0] == first
                stack.append(child)
        assert seen == set(self._entries)
        entries = self._entries.values()
        assert self.tokens == (
            sum(entry.length for entry in entries)
            if self.copies
            else total + sum(entry.doubles for entry in entries)
        )


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading elements are equal."""
    shorter = min(len(a), len(b))
    for index in range(shorter):
        if a[index] != b[index]:
            return index
    return shorter
