"""`kvyard explain` on the live daemon: who waits for what, who gave way for whom, and after the end too."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.streams import Wish, run_all, wishes

FLAGS = ("--kv-blocks", "24", "--max-running", "4", "--max-step-tokens", "64", "--discipline", "vllm")

SLOWLY = {"KVYARD_TEST_FAULTS": json.dumps([{"point": "model", "action": "sleep", "seconds": 0.05}])}
"""Who waits does so for seconds."""


def request_ids(running: DaemonProcess, state: str) -> list[str]:
    """Ids of the unfinished requests in that state, over the control socket."""
    from kvyard.control.client import Client

    with Client(running.socket) as client:
        page: dict[str, Any] = client.call("requests", {"limit": 100})
    return [row["request_id"] for row in page["rows"] if row["state"] == state]


def explained(running: DaemonProcess, request_id: str) -> dict[str, Any]:
    (answer,) = running.ask("explain", request_id)["sequences"]
    found: dict[str, Any] = answer
    return found


def test_explain_answers_for_the_waiting_the_preempted_and_the_finished(quick_model_folder: Path) -> None:
    wanted: list[Wish] = wishes(10, seed=81, prompt=(40, 60), output=(45, 55), ids=(0, 250))

    async def scene(running: DaemonProcess) -> str:
        task = asyncio.create_task(run_all(running.base, wanted))
        await asyncio.to_thread(wait_until, lambda: len(request_ids(running, "waiting")) > 2, 30, "a queue")
        waiting = request_ids(running, "waiting")[-1]
        answer = await asyncio.to_thread(explained, running, waiting)
        assert answer["state"] == "waiting"
        assert answer["waiting_for"]["reason"] in ("slots", "blocks", "queued", "after a preemption", "budget")
        assert answer["waiting_for"]["wakes"]
        assert answer["waiting_for"]["waiting_s"] > 0
        text = await asyncio.to_thread(running.cli, "explain", waiting)
        assert "waits for" in text.stdout
        assert "wakes:" in text.stdout
        await task
        return waiting

    with daemon(*FLAGS, model=quick_model_folder, env=SLOWLY) as running:
        waited = asyncio.run(scene(running))
        done = explained(running, waited)
        assert done["state"] == "finished (length)"
        assert done["waiting_for"] is None
        status = running.status()
        assert status["requests"]["preemptions"] > 0, "the pool was meant to be too small"
        dump = running.ask("dump")
        assert dump["status"]["requests"]["finished"] == len(wanted)
        missing = running.cli("explain", "nobody")
        assert missing.returncode != 0
        assert "nothing is known of a request 'nobody'" in missing.stderr
