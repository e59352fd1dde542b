"""Stop strings in a text that arrives in pieces.

An Aho-Corasick automaton over all stop strings: its state is the longest suffix of the text that is a
prefix of some stop string, which is exactly what must be held back and no more. The outcome depends on
the characters alone, never on how they were cut into tokens: the stop string that is complete first
wins, of several complete at the same character the longest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True)
class _Node:
    """A prefix of some stop string."""

    depth: int
    next: dict[str, _Node] = field(default_factory=dict)
    fail: _Node | None = None
    stop: str | None = None
    """The longest stop string that ends here."""


class Found(NamedTuple):
    """Text that may be shown, and the stop string that ended it, if one did."""

    text: str
    stop: str | None


class StopStrings:
    """The automaton of a request's stop strings, shared by its continuations. Empty strings are ignored."""

    __slots__ = ("_root",)

    def __init__(self, stops: Iterable[str]) -> None:
        self._root = _Node(0)
        for stop in stops:
            if stop:
                self._insert(stop)
        self._link()

    def __bool__(self) -> bool:
        return bool(self._root.next)

    def scanner(self) -> StopScanner:
        """A scanner for one continuation's text."""
        return StopScanner(self._root)

    def _insert(self, stop: str) -> None:
        node = self._root
        for char in stop:
            node = node.next.setdefault(char, _Node(node.depth + 1))
        node.stop = stop

    def _link(self) -> None:
        queue = deque(self._root.next.values())
        for node in queue:
            node.fail = self._root
        while queue:
            node = queue.popleft()
            for char, child in node.next.items():
                child.fail = _step(node.fail, char, self._root)
                child.stop = child.stop or child.fail.stop
                queue.append(child)


def _step(node: _Node | None, char: str, root: _Node) -> _Node:
    """The state after `char`: follow failures until some prefix can be extended."""
    while node is not None:
        following = node.next.get(char)
        if following is not None:
            return following
        node = node.fail
    return root


class StopScanner:
    """Finds stop strings in one continuation's text, holding back only what may become one."""

    __slots__ = ("_held", "_node", "_root")

    def __init__(self, root: _Node) -> None:
        self._root = root
        self._node = root
        self._held = ""

    def feed(self, text: str, *, ends: bool = True) -> Found:
        """More text. After a stop string was found the scanner is not fed again.

        Without `ends` one that is complete in this text is passed over, but one that begins here may end later.
        """
        root, node = self._root, self._node
        for at, char in enumerate(text):
            node = _step(node, char, root)
            if node.stop is None:
                continue
            if ends:
                shown = self._held + text[: at + 1]
                self._held = ""
                return Found(shown[: len(shown) - len(node.stop)], node.stop)
            while not node.next and node.fail is not None:
                node = node.fail  # nothing goes on from here: no reason to hold it back
        self._node = node
        whole = self._held + text
        cut = len(whole) - node.depth
        self._held = whole[cut:]
        return Found(whole[:cut], None)

    def flush(self) -> str:
        """The held text, at the end of a continuation that no stop string ended."""
        held, self._held, self._node = self._held, "", self._root
        return held
