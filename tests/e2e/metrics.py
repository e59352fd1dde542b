"""Reading the daemon's metrics in tests."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.daemon import DaemonProcess, wait_until
from tests.e2e.timing import limit


def value(running: DaemonProcess, name: str, **labels: str) -> float:
    """The sum of the series of this name that have these labels."""
    return of_text(running.get("/metrics").text, name, **labels)


def of_text(text: str, name: str, **labels: str) -> float:
    """Likewise, of metrics that were read already."""
    # Parsing all of them takes longer than the daemon needs to tell them.
    lines = "".join(line + "\n" for line in text.splitlines() if line.startswith((name + "{", name + " ")))
    total = 0.0
    found = False
    for family in text_string_to_metric_families(lines):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                total += sample.value
                found = True
    assert found, f"there is no series {name} {labels}"
    return total


def idle_again(running: DaemonProcess) -> None:
    """Everything that counts what runs is back at its base."""

    def settled() -> bool:
        text = running.get("/metrics").text
        return (
            of_text(text, "kvyard_sequences_running") == 0
            and of_text(text, "kvyard_sequences_waiting") == 0
            and of_text(text, "kvyard_kv_blocks", state="used") == 0
        )

    wait_until(settled, limit(5), "running, waiting and used blocks to be 0")
    text = running.get("/metrics").text
    assert of_text(text, "vllm:num_requests_running") == 0
    assert of_text(text, "vllm:num_requests_waiting") == 0
    assert of_text(text, "vllm:kv_cache_usage_perc") == 0
