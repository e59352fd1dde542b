"""Token ids to text while they come: the joined pieces equal the text of all ids decoded at once."""

from __future__ import annotations

from collections.abc import Callable
from encodings.utf_8 import IncrementalDecoder


class Detokenizer:
    """One sequence's text.

    A character split over tokens comes out with the token that completes it. U+FFFD stands for bytes that
    can never become valid, at once, and for a character still incomplete when the sequence ends.
    """

    __slots__ = ("_bytes_of", "_decoder", "_hidden")

    def __init__(
        self, bytes_of: Callable[[int], bytes], hidden: frozenset[int] = frozenset(), begun: bytes = b""
    ) -> None:
        """`bytes_of` gives a token's bytes; tokens in `hidden` leave no text.

        `begun` are the bytes of an incomplete character that comes before.
        """
        self._bytes_of = bytes_of
        self._hidden = hidden
        self._decoder = IncrementalDecoder("replace")
        self._decoder.decode(begun)

    def feed(self, token: int) -> str:
        """The text that `token` completes; may be empty."""
        if token in self._hidden:
            return ""
        return self._decoder.decode(self._bytes_of(token))

    def breaks(self, token: int) -> bool:
        """Whether `token` cuts off an incomplete character, so that what it completes begins with U+FFFD for that."""
        held = self._decoder.buffer
        if not held or token in self._hidden:
            return False
        try:
            (held + self._bytes_of(token)[:1]).decode()
        except UnicodeDecodeError as error:
            return error.reason != "unexpected end of data"
        return False

    def finish(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character, else nothing."""
        return self._decoder.decode(b"", True)
