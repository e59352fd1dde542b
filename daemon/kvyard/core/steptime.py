"""How long a step takes, fitted on line: seconds = a + b * decodes + c * prompt tokens.

Weighted least squares that forgets, so it follows a load whose contexts grow. The sums of products are kept and
solved anew when somebody asks and every few steps, drawn towards the last weights: a load that does not vary (the
same chunk in every step) says nothing of how the parts of a step's time divide, and then they stay as they were.
The recursive form that keeps an inverse loses its footing on such a load. Three coefficients in plain Python cost
microseconds.
"""

from __future__ import annotations

FORGET = 0.99
"""Weight of a step after each further one: the fit looks back over about a hundred steps."""
PULL = 1.0
"""Weight of the last weights, in steps."""
MIN_STEPS = 8
SOLVE_EVERY = 16
"""Steps after which the weights are made although nobody asked: what a varied load taught must not be forgotten
while one that does not vary goes on."""
COPY_WEIGHT = 0.2
"""Weight of the newest copy in the running mean of the time per block."""
Vector = tuple[float, float, float]


class OnlineStepTime:
    """A `kvyard.policy.StepTime`. Scaled inputs keep the fit well conditioned."""

    SCALE: Vector = (1.0, 1 / 64, 1 / 512)

    def __init__(self) -> None:
        self._weights: Vector = (0.0, 0.0, 0.0)
        self._observed: list[tuple[int, int, float]] = []
        """Steps that the sums and weights do not have yet: they get them when somebody asks, and every few steps."""
        self._products = (0.0,) * 6
        """Forgetting sums of the products of inputs: 00, 01, 02, 11, 12, 22."""
        self._targets: Vector = (0.0, 0.0, 0.0)
        """Forgetting sums of input times seconds."""
        self._steps = 0
        self._per_block = 0.0

    def seconds(self, decodes: int, prompt_tokens: int) -> float:
        """Expected duration of such a step; 0.0 before enough steps were seen."""
        if self._observed:
            self._learn()
        if self._steps < MIN_STEPS:
            return 0.0
        a, b, c = self._weights
        _, x, y = self._inputs(decodes, prompt_tokens)
        return max(0.0, a + b * x + c * y)

    def copy_seconds(self, blocks: int) -> float:
        """Expected time to copy that many blocks to or from the host pool; 0.0 before a copy was seen."""
        return self._per_block * blocks

    def observe(self, decodes: int, prompt_tokens: int, seconds: float, copied_blocks: int = 0) -> None:
        """A step of that many decodes, prompt tokens and copied blocks took `seconds`."""
        if copied_blocks:
            self._observe_copy(seconds - self.seconds(decodes, prompt_tokens), copied_blocks)
            return  # what the copies took would be taken for work of the model
        self._observed.append((decodes, prompt_tokens, seconds))
        if len(self._observed) == SOLVE_EVERY:
            self._learn()

    def _learn(self) -> None:
        """Take in what was observed since the last time; many at once cost a fifth of what one by one does."""
        for decodes, prompt_tokens, seconds in self._observed:
            self._add(decodes, prompt_tokens, seconds)
        self._observed.clear()
        self._weights = self._solve()

    def _add(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        # Written out: as comprehensions it takes three times as long.
        one, x, y = self._inputs(decodes, prompt_tokens)
        a, b, c, d, e, f = self._products
        keep = FORGET
        self._products = (
            keep * a + one, keep * b + x, keep * c + y, keep * d + x * x, keep * e + x * y, keep * f + y * y,
        )  # fmt: skip
        u, v, w = self._targets
        self._targets = (keep * u + seconds, keep * v + x * seconds, keep * w + y * seconds)
        self._steps += 1

    def _solve(self) -> Vector:
        """The weights that fit best, drawn towards the last ones; the matrix is positive definite."""
        a, b, c, d, e, f = self._products
        a, d, f = a + PULL, d + PULL, f + PULL
        u, v, w = (t + PULL * last for t, last in zip(self._targets, self._weights, strict=True))
        co_a, co_b, co_c = d * f - e * e, c * e - b * f, b * e - c * d
        inverse = 1.0 / (a * co_a + b * co_b + c * co_c)
        first = (co_a * u + co_b * v + co_c * w) * inverse
        second = (co_b * u + (a * f - c * c) * v + (b * c - a * e) * w) * inverse
        third = (co_c * u + (b * c - a * e) * v + (a * d - b * b) * w) * inverse
        return first, second, third

    def _observe_copy(self, seconds: float, blocks: int) -> None:
        if self._steps < MIN_STEPS:
            return
        # Never quite zero: zero says that no copy was seen.
        per_block = max(seconds, 1e-9) / blocks
        weight = COPY_WEIGHT if self._per_block else 1.0
        self._per_block += weight * (per_block - self._per_block)

    def _inputs(self, decodes: int, prompt_tokens: int) -> Vector:
        return (self.SCALE[0], decodes * self.SCALE[1], prompt_tokens * self.SCALE[2])
