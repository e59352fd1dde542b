"""LMDeploy: prefill turns and decode turns, and among prefills short turns and long ones.

Source: LMDeploy's PyTorch engine, `pytorch/paging/scheduler.py` and `engine/inputs_maker.py`. Prefill while less
than half of the places are taken, when enough prompt tokens wait, or after 16 decode steps. In three of four
turns short prompts go by size; the fourth begins with one long prompt, chosen by its chunks less its age. It
gives up the order of arrival; it wins that neither short nor long prompts starve each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvyard.policy import (
    ADMIT,
    DECODE,
    PROMPT,
    PROMPT_OR_DECODE,
    Admission,
    AdmissionPolicy,
    Discipline,
    PolicyParams,
    PrefillPolicy,
    RequestView,
    Shape,
    Snapshot,
    live,
)

MAX_PREFILL = 8192
WINDOW = 512
"""Waiting requests that are looked at: sorting a longer queue would cost more than a step may."""


class TurnsAdmission(AdmissionPolicy):
    """Short prompts by size; in every fourth turn one long prompt before them."""

    name = "lmdeploy-turns"

    class Params(PolicyParams):
        """What is long, and how often it has its turn."""

        max_prefill_token_num: int = live(MAX_PREFILL, ge=1, unit="tokens", doc="A longer prompt is long.")
        short_turns: int = live(3, ge=0, unit="turns", doc="Short turns between two long ones.")
        age_credit: float = live(2.0, ge=0.001, unit="seconds", doc="Waiting so long makes up for one chunk.")

    params: Params
    _short_turns = 0

    def admit(self, s: Snapshot) -> Admission:
        p = self.params
        waiting = list(islice(s.waiting, WINDOW))
        short = sorted(
            (r for r in waiting if r.wanted <= p.max_prefill_token_num), key=lambda r: (r.wanted, r.arrival)
        )
        long = [r for r in waiting if r.wanted > p.max_prefill_token_num]
        if not long or s.placed or (short and self._short_turns < p.short_turns):
            self._short_turns += 1
            return Admission(short)
        self._short_turns = 0
        return Admission([min(long, key=lambda r: self._rank(s, r)), *short])

    def _rank(self, s: Snapshot, r: RequestView) -> tuple[int, int, int]:
        chunks = -(-r.wanted // self.params.max_prefill_token_num)
        return chunks - int((s.now - r.arrived) / self.params.age_credit), r.wanted, r.arrival


class TurnsPrefill(PrefillPolicy):
    """A prefill turn or a decode turn; short prompts are never cut."""

    name = "lmdeploy-turns"

    class Params(PolicyParams):
        """When it is the prompts' turn."""

        max_prefill_token_num: int = live(MAX_PREFILL, ge=1, unit="tokens", doc="Most prompt tokens of a turn.")
        prefill_interval: int = live(16, ge=0, unit="decode steps", doc="After so many it is the prompts' turn.")

    params: Params

    def shape(self, s: Snapshot) -> Shape:
        most = self.params.max_prefill_token_num
        groups = PROMPT_OR_DECODE.groups if self._prompts_turn(s) else ((DECODE,), (PROMPT, ADMIT))
        return Shape(groups, prompts=most)

    def _prompts_turn(self, s: Snapshot) -> bool:
        if s.step - s.count.last_prefill > self.params.prefill_interval or 2 * len(s.running) < s.max_running:
            return True
        tokens = 0
        for r in islice(s.waiting, WINDOW):
            tokens += r.wanted
            if tokens >= self.params.max_prefill_token_num:
                return True
        return False

    def divide(self, s: Snapshot, prompts: Sequence[RequestView], left: int) -> Sequence[int]:
        most = min(self.params.max_prefill_token_num, s.budget)
        return [
            left if r.wanted - r.hits * s.block_size <= left or r.wanted > most or r.computed else 0 for r in prompts
        ]


class Lmdeploy(Discipline):
    """LMDeploy: prefill and decode turns, short prompts by size, long ones by age."""

    name = "lmdeploy-turns"
    doc = "LMDeploy: prefill and decode turns, short prompts by size, long ones by chunks and age"
    parts = {
        "admission": ("lmdeploy-turns", {}),
        "preemption": ("latest-arrival", {}),
        "prefill": ("lmdeploy-turns", {}),
    }
