"""Named bundles of one policy of each kind, with the parameters that belong together."""

from __future__ import annotations

from kvyard.policy import Discipline


class Kvyard(Discipline):
    """The default: vLLM's shape with a priority that ages, so that urgent requests go first and none starves."""

    name = "kvyard"
    doc = "vLLM's shape with a priority that ages"
    parts = {
        "admission": ("aging", {}),
        "preemption": ("aging", {}),
        "prefill": ("vllm", {}),
    }


class Vllm(Discipline):
    """vLLM's V1 scheduler, first come first served."""

    name = "vllm"
    doc = "vLLM's V1 scheduler: running first, then newcomers, in one token budget"
    parts = {
        "admission": ("vllm", {}),
        "preemption": ("vllm", {}),
        "prefill": ("vllm", {}),
    }


class VllmPriority(Discipline):
    """vLLM's V1 scheduler with `--scheduling-policy priority`."""

    name = "vllm-priority"
    doc = "vLLM's V1 scheduler, by strict priority"
    parts = {
        "admission": ("vllm", {"order": "priority"}),
        "preemption": ("vllm", {"order": "priority"}),
        "prefill": ("vllm", {}),
    }


class Sarathi(Discipline):
    """Sarathi-Serve: decodes first, prompts in chunks that fill up a step of fixed size."""

    name = "sarathi"
    doc = "Sarathi-Serve: decodes first, prompts in chunks of a fixed step size"
    parts = {
        "admission": ("vllm", {"watermark": 0.01, "batch": 128}),
        "preemption": ("vllm", {}),
        "prefill": ("decode-first", {"chunk": 512}),
    }
