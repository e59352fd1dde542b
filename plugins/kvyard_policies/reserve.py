"""Admission that never has to preempt: who comes in has blocks for its whole life.

Source: TensorRT-LLM's GUARANTEED_NO_EVICT. It gives up concurrency, since most requests end before their
longest, and wins that nothing is ever computed twice.
"""

from __future__ import annotations

from kvyard.policy import Admission, AdmissionPolicy, Snapshot


class WholeLifeAdmission(AdmissionPolicy):
    """A request comes in when the blocks for all it may ever hold are there, and stay promised to it."""

    name = "whole-life"

    def admit(self, s: Snapshot) -> Admission:
        return Admission(((r, r.kv_max) for r in s.waiting), keep=promised(s), hold=True)


def promised(s: Snapshot) -> int:
    """Blocks that the running sequences take on top of theirs if each runs to its longest."""
    cols = s.cols
    return int((-(-cols.kv_max // s.block_size) - cols.blocks).sum())
