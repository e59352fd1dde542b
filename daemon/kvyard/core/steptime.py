"""How long a step takes, fitted on line: seconds = a + b * decodes + c * prompt tokens.

Recursive least squares that forgets, so it follows a load whose contexts grow. Three coefficients in plain
Python cost a microsecond a step.
"""

from __future__ import annotations

FORGET = 0.99
"""Weight of a step after each further one: the fit looks back over about a hundred steps."""
MIN_STEPS = 8
COPY_WEIGHT = 0.2
"""Weight of the newest copy in the running mean of the time per block."""
Vector = tuple[float, float, float]


class OnlineStepTime:
    """A `kvyard.policy.StepTime`. Scaled inputs keep the fit well conditioned."""

    SCALE: Vector = (1.0, 1 / 64, 1 / 512)

    def __init__(self) -> None:
        self._weights: list[float] = [0.0, 0.0, 0.0]
        self._inverse = [[1e3 if i == j else 0.0 for j in range(3)] for i in range(3)]
        self._steps = 0
        self._per_block = 0.0

    def seconds(self, decodes: int, prompt_tokens: int) -> float:
        """Expected duration of such a step; 0.0 before enough steps were seen."""
        if self._steps < MIN_STEPS:
            return 0.0
        x = self._inputs(decodes, prompt_tokens)
        return max(0.0, sum(w * v for w, v in zip(self._weights, x, strict=True)))

    def copy_seconds(self, blocks: int) -> float:
        """Expected time to copy that many blocks to or from the host pool; 0.0 before a copy was seen."""
        return self._per_block * blocks

    def observe(self, decodes: int, prompt_tokens: int, seconds: float, copied_blocks: int = 0) -> None:
        """A step of that many decodes, prompt tokens and copied blocks took `seconds`."""
        if copied_blocks:
            self._observe_copy(seconds - self.seconds(decodes, prompt_tokens), copied_blocks)
            return  # what the copies took would be taken for work of the model
        x = self._inputs(decodes, prompt_tokens)
        p = self._inverse
        px = [sum(row[j] * x[j] for j in range(3)) for row in p]
        gain = [v / (FORGET + sum(x[j] * px[j] for j in range(3))) for v in px]
        error = seconds - sum(w * v for w, v in zip(self._weights, x, strict=True))
        self._weights = [w + g * error for w, g in zip(self._weights, gain, strict=True)]
        # Forgetting lets the inverse grow without bound while the load does not vary; the cap ends that.
        self._inverse = [
            [min(1e6, max(-1e6, (p[i][j] - gain[i] * px[j]) / FORGET)) for j in range(3)] for i in range(3)
        ]
        self._steps += 1

    def _observe_copy(self, seconds: float, blocks: int) -> None:
        if self._steps < MIN_STEPS:
            return
        # Never quite zero: zero says that no copy was seen.
        per_block = max(seconds, 1e-9) / blocks
        weight = COPY_WEIGHT if self._per_block else 1.0
        self._per_block += weight * (per_block - self._per_block)

    def _inputs(self, decodes: int, prompt_tokens: int) -> Vector:
        return (self.SCALE[0], decodes * self.SCALE[1], prompt_tokens * self.SCALE[2])
