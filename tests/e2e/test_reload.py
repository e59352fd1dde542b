"""SIGHUP: live settings change under way, the others are named and wait for a restart, nonsense changes nothing."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from tests.e2e.daemon import DaemonProcess, daemon, wait_until


def last_reload(running: DaemonProcess) -> str:
    """What the event log says of the last reload; empty before the first."""
    lines = running.cli("events", "--json").stdout.splitlines()
    events = [event for event in map(json.loads, lines) if event["data"]["kind"] == "reload"]
    return str(events[-1]["data"]["message"]) if events else ""


def test_a_reload_applies_what_is_live_and_names_the_rest(default_model: Path, tmp_path: Path) -> None:
    config = tmp_path / "kvyard.toml"
    config.write_text("max_waiting = 100\nblock_size = 16\n")
    with daemon("--config", str(config), model=default_model) as running:
        assert running.status()["limits"]["max_waiting"] == 100
        config.write_text("max_waiting = 7\nblock_size = 32\n")
        running.process.send_signal(signal.SIGHUP)
        wait_until(lambda: running.status()["limits"]["max_waiting"] == 7, 10, "the reload")
        assert last_reload(running) == "in force now: max_waiting; needs a restart: block_size"
        assert running.status()["kv"]["block_size"] == 16
        config.write_text("max_waiting = nonsense\n")
        running.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "refused and nothing changed" in last_reload(running), 10, "the refusal")
        assert running.status()["limits"]["max_waiting"] == 7
        assert running.complete("still here", max_tokens=2)["choices"]
