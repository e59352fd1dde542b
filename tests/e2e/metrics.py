"""Reading the daemon's metrics in tests."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.daemon import DaemonProcess, wait_until


def value(running: DaemonProcess, name: str, **labels: str) -> float:
    """The sum of the series of this name that have these labels."""
    total = 0.0
    found = False
    for family in text_string_to_metric_families(running.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                total += sample.value
                found = True
    assert found, f"there is no series {name} {labels}"
    return total


def idle_again(running: DaemonProcess) -> None:
    """Everything that counts what runs is back at its base."""

    def settled() -> bool:
        return (
            value(running, "kvyard_sequences_running") == 0
            and value(running, "kvyard_sequences_waiting") == 0
            and value(running, "kvyard_kv_blocks", state="used") == 0
        )

    wait_until(settled, 5, "running, waiting and used blocks to be 0")
    assert value(running, "vllm:num_requests_running") == 0
    assert value(running, "vllm:num_requests_waiting") == 0
    assert value(running, "vllm:kv_cache_usage_perc") == 0
