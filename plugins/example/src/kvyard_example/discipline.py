"""A discipline: one policy of each kind under one name."""

from kvyard.policy import Discipline


class Example(Discipline):
    """Short prompts first, small steps, few victims."""

    api = (1, 0)
    doc = "Short prompts first, small steps, few victims."
    parts = {
        "admission": ("example-shortest-first", {}),
        "preemption": ("example-most-blocks", {}),
        "prefill": ("example-share", {"share": 0.5}),
    }
