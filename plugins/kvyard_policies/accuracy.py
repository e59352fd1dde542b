"""How good a policy's promises of output lengths were, for its `dump`."""

from __future__ import annotations

from kvyard.policy import Value

MOST = 4000
"""Promises that are remembered."""


class Accuracy:
    """How far the promise at admission was from what came."""

    def __init__(self) -> None:
        self._promised: dict[int, int] = {}
        self.over = self.under = self.exact = 0
        """Requests whose output was shorter, longer, and as long as was reserved."""
        self.tokens_over = self.tokens_under = 0

    def promised(self, id: int, output: int) -> None:
        """`output` tokens are to be reserved for a sequence that waits; the last promise before it came in counts."""
        self._promised[id] = output
        if len(self._promised) > MOST:  # those that were cancelled, and those long in the queue
            for old in list(self._promised)[: MOST // 2]:
                del self._promised[old]

    def ended(self, id: int, output: int) -> None:
        """A sequence ended with `output` tokens."""
        wrong = self._promised.pop(id, output) - output
        self.over += wrong > 0
        self.under += wrong < 0
        self.exact += wrong == 0
        self.tokens_over += max(0, wrong)
        self.tokens_under += max(0, -wrong)

    def describe(self) -> dict[str, Value]:
        """Counts and mean errors in tokens."""
        return {
            "over": self.over,
            "under": self.under,
            "exact": self.exact,
            "mean_tokens_over": self.tokens_over / max(1, self.over),
            "mean_tokens_under": self.tokens_under / max(1, self.under),
        }
