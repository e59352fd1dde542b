"""What policies learn from: the sequences that ran to their end since they last looked."""

from __future__ import annotations

from itertools import takewhile

from kvyard.policy import Ended, Snapshot


def ended_since(s: Snapshot, last: int) -> list[Ended]:
    """Those that ended after the sequence with the id `last`, newest first; all that are known if it is not there."""
    return list(takewhile(lambda e: e.id != last, reversed(s.ended)))
