"""How long a step takes, fitted on line: seconds = a + b * decodes + c * prompt tokens.

Recursive least squares that forgets, so it follows a load whose contexts grow. Three coefficients in plain
Python cost a microsecond a step.
"""

from __future__ import annotations

FORGET = 0.99
"""Weight of a step after each further one: the fit looks back over about a hundred steps."""
MIN_STEPS = 8
Vector = tuple[float, float, float]


class OnlineStepTime:
    """A `kvyard.policy.StepTime`. Scaled inputs keep the fit well conditioned."""

    SCALE: Vector = (1.0, 1 / 64, 1 / 512)

    def __init__(self) -> None:
        self._weights: list[float] = [0.0, 0.0, 0.0]
        self._inverse = [[1e3 if i == j else 0.0 for j in range(3)] for i in range(3)]
        self._steps = 0

    def seconds(self, decodes: int, prompt_tokens: int) -> float:
        """Expected duration of such a step; 0.0 before enough steps were seen."""
        if self._steps < MIN_STEPS:
            return 0.0
        x = self._inputs(decodes, prompt_tokens)
        return max(0.0, sum(w * v for w, v in zip(self._weights, x, strict=True)))

    def observe(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """A step of that many decodes and prompt tokens took `seconds`."""
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

    def _inputs(self, decodes: int, prompt_tokens: int) -> Vector:
        return (self.SCALE[0], decodes * self.SCALE[1], prompt_tokens * self.SCALE[2])
