"""SGLang: prompts before decodes, an adaptive share of future output reserved, the least advanced retracted.

Source: SGLang 0.5.23, `srt/managers/schedule_policy.py` and `scheduler.py`. It gives up steady decodes, which
stand still while prompts are computed, and fairness to young requests, which are retracted first and go to
the end of the queue; it wins an early first token and a fuller pool than whole-life reservations allow.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from kvyard.policy import (
    ADMIT,
    DECODE,
    PROMPT,
    PROMPT_OR_DECODE,
    Admission,
    AdmissionPolicy,
    Cause,
    Discipline,
    Overtaken,
    PolicyParams,
    PreemptionPolicy,
    PrefillPolicy,
    RequestView,
    Shape,
    Snapshot,
    Value,
    Victims,
    live,
    nobody,
)

from kvyard_policies.whole_prompts import uncached

RETRACT_AHEAD = 20
"""Decode steps that the ratio after a retraction provides for."""
LONGEST_SORTED_QUEUE = 128
"""A longer queue is served in the order of arrival, whatever the order asked for."""


class SglangAdmission(AdmissionPolicy):
    """A newcomer's whole output is reserved, of those that run a ratio that falls while nothing is retracted."""

    name = "sglang"

    class Params(PolicyParams):
        """The ratio of future output that is reserved, and the order of the queue."""

        order: str = live(
            "fcfs", choices=("fcfs", "lpm", "lof"), doc="lpm: longest cached prefix; lof: longest output."
        )
        conservativeness: float = live(1.0, ge=0, le=10, doc="Scales the ratio that a fresh engine begins with, 0.7.")
        clip: int = live(4096, ge=1, unit="tokens", doc="Most output of a request that is reserved.")
        floor: float = live(0.14, ge=0, le=1, unit="of the first ratio", doc="The ratio falls no lower.")
        decay: int = live(600, ge=1, unit="decode steps", doc="So long the ratio takes to fall to its floor.")
        passes: int = live(
            64, ge=1, le=512, unit="admissions", doc="Under lpm and lof: who saw so many others come in comes next."
        )

    params: Params
    ratio = 1.0
    _decodes = _preempted = 0
    _full = (-1, -1)

    def __init__(self, **values: Value) -> None:
        super().__init__(**values)
        self._overtaken = Overtaken()

    def admit(self, s: Snapshot) -> Admission:
        if (s.count.finished, s.count.preempted) == self._full:
            return nobody("full until a request leaves")
        self._follow(s)
        keep = self._reserved(s)
        room, tokens, take = s.free - keep, s.left_prompts, []
        for r in self._ordered(s):
            need = r.total + min(r.remaining, self.params.clip) + s.block_size
            room -= s.blocks_for(need) - r.hits
            if room < 0 and s.running:
                self._full = (s.count.finished, s.count.preempted)
                break
            take.append((r, need))
            tokens -= uncached(s, r)
            if tokens <= 0 or len(take) >= s.slots:
                break
        return Admission(take, keep=keep, hold=True)

    def _follow(self, s: Snapshot) -> None:
        """The ratio: down with every decode step, up to what is needed after a retraction, anew when idle."""
        p, count, cols = self.params, s.count, s.cols
        first = min(0.7 * p.conservativeness, 1.0)
        lowest = first * p.floor
        if not s.running:
            self.ratio = first
        elif count.preempted > self._preempted:
            made, most = int(cols.generated.sum()), int((cols.generated + cols.remaining).sum())
            self.ratio = min(1.0, (made + RETRACT_AHEAD * len(s.running)) / (most + 1))
        else:
            steps = count.decode_steps - self._decodes
            self.ratio = max(lowest, self.ratio - (first - lowest) / p.decay * steps)
        self._decodes, self._preempted = count.decode_steps, count.preempted

    def _reserved(self, s: Snapshot) -> int:
        """Blocks for the output to come of those that run: the ratio of it, all of it for a prompt under way."""
        cols = s.cols
        share = np.where(cols.total - cols.computed > 1, 1.0, self.ratio)
        tokens = float((np.minimum(cols.remaining, self.params.clip) * share).sum())
        # Strictly less than what is available must be asked for, hence one more when tokens are blocks.
        return int(tokens / s.block_size) + 1 if s.running else 0

    def _ordered(self, s: Snapshot) -> Iterable[RequestView]:
        if self.params.order == "fcfs" or len(s.waiting) > LONGEST_SORTED_QUEUE:
            return s.waiting
        # Not SGLang's: with a steady flow of hot prefixes a cold request would never come in.
        late, lpm = self._overtaken.by(s, self.params.passes), self.params.order == "lpm"
        return sorted(s.waiting, key=lambda r: (0, 0) if r.id in late else (1, -(r.hits if lpm else r.max_new)))


class RetractPreemption(PreemptionPolicy):
    """Who has the fewest output tokens goes first, among equals the longest prompt, and to the end of the queue."""

    name = "sglang"

    def victims(self, s: Snapshot, short: int, who: RequestView, cause: Cause) -> Victims:
        if cause == "admission":
            return Victims(())
        running, cols = s.running, s.cols
        order = np.lexsort((-cols.prompt_len, cols.generated))
        return Victims([running[i] for i in order.tolist()], requeue="tail")


class PrefillFirstPrefill(PrefillPolicy):
    """A step is prompts as long as there are any, in chunks of whole blocks; otherwise it is all decodes."""

    name = "sglang"

    class Params(PolicyParams):
        """Size of a prefill step."""

        chunk: int = live(
            8192, ge=1, unit="tokens", doc="Most prompt tokens of a step (chunked_prefill_size), a block at least."
        )
        mixed: bool = live(False, doc="Let decodes join the prefill steps, charged before the prompts.")

    params: Params

    def shape(self, s: Snapshot) -> Shape:
        chunk = max(self.params.chunk, s.block_size)
        if self.params.mixed:
            return Shape(((PROMPT, ADMIT, DECODE),), prompts=max(0, min(chunk, s.budget) - s.decoding))
        return Shape(PROMPT_OR_DECODE.groups, prompts=chunk)

    def divide(self, s: Snapshot, prompts: Iterable[RequestView], left: int) -> list[int]:
        whole = left - left % s.block_size
        if not whole and not s.placed:  # less than a block is all that this step has
            return [left for _ in prompts]
        return [left if uncached(s, r) <= left else whole for r in prompts]


class Sglang(Discipline):
    """SGLang: prompts before decodes, an adaptive reserve, the least advanced retracted."""

    name = "sglang"
    doc = "SGLang: prompts before decodes, an adaptive reserve for output, the least advanced retracted"
    parts = {
        "admission": ("sglang", {}),
        "preemption": ("sglang", {}),
        "prefill": ("sglang", {}),
    }
