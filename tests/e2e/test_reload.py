"""SIGHUP: live settings change under way, the others are named and wait for a restart, nonsense changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from functools import partial
from pathlib import Path

from kvyard.control.client import Client
from kvyard.front.keys import make_key

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.metrics import value
from tests.e2e.records import recording
from tests.e2e.streams import Result, run_all, wishes
from tests.e2e.timing import limit


def last_reload(running: DaemonProcess) -> str:
    """What the event log says of the last reload; empty before the first."""
    lines = running.cli("events", "--json").stdout.splitlines()
    events = [event for event in map(json.loads, lines) if event["data"]["kind"] == "reload"]
    return str(events[-1]["data"]["message"]) if events else ""


def told(running: DaemonProcess, begin: str) -> bool:
    """Whether the last reload's entry begins like that."""
    return last_reload(running).startswith(begin)


def test_a_reload_applies_what_is_live_and_names_the_rest(quick_model_folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "kvyard.toml"
    config.write_text("max_waiting = 100\nblock_size = 16\n")
    with daemon("--config", str(config), model=quick_model_folder) as running:
        assert running.status()["limits"]["max_waiting"] == 100
        config.write_text("max_waiting = 7\nblock_size = 32\n")
        running.process.send_signal(signal.SIGHUP)
        wait_until(lambda: running.status()["limits"]["max_waiting"] == 7, 10, "the reload")
        assert last_reload(running) == "in force now: max_waiting; needs a restart: block_size"
        assert running.status()["kv"]["block_size"] == 16
        shown = running.cli("config", "show", "--running").stdout
        assert "16 (32 after a restart)" in shown
        assert " 7 " in next(line for line in shown.splitlines() if line.startswith("max_waiting "))
        config.write_text("max_waiting = nonsense\n")
        running.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "refused and nothing changed" in last_reload(running), 10, "the refusal")
        assert running.status()["limits"]["max_waiting"] == 7
        assert running.complete("still here", max_tokens=2)["choices"]
        keys, made = tmp_path / "keys", [make_key(name)[1].line + "\n" for name in ("a", "b", "c")]
        for lines, said in (
            (made[:2], "api_key_file, api keys: 2 added"),
            (made[1:], "api keys: 1 added, 1 revoked"),
        ):
            keys.write_text("".join(lines))
            config.write_text(f'max_waiting = 7\nblock_size = 32\napi_key_file = "{keys}"\n')
            running.process.send_signal(signal.SIGHUP)
            wait_until(partial(told, running, f"in force now: {said}"), 10, said)


def test_places_are_changed_live_and_what_runs_goes_on(quick_model_folder: Path, tmp_path: Path) -> None:
    """`max_running` lowered under load: nobody is put out, nobody comes in until fewer run; the next engine too."""
    config = tmp_path / "kvyard.toml"
    config.write_text("max_running = 6\n")

    def reload(places: int, said: str) -> None:
        config.write_text(f"max_running = {places}\n")
        running.process.send_signal(signal.SIGHUP)
        wait_until(lambda: said in str(client.call("events", {"limit": 5})), limit(10), "the reload")

    wanted = wishes(10, seed=5, prompt=(8, 8), output=(150, 150), ids=(0, 250))
    go_on = tmp_path / "go on"
    held = json.dumps([{"point": "model", "action": "hold", "computed": 100, "until": str(go_on)}])
    flags = ("--config", str(config), "--dtype", "float32", "--kv-blocks", "256")
    with (
        daemon(*flags, model=quick_model_folder, env={"KVYARD_TEST_FAULTS": held}) as running,
        Client(running.socket) as client,
        recording(running) as records,
    ):

        async def scene() -> list[Result]:
            client.call("pause")
            task = asyncio.create_task(run_all(running.base, wanted))
            await asyncio.to_thread(
                wait_until, lambda: client.call("requests", {"limit": 1})["total"] == 10, limit(20), "all to wait"
            )
            client.call("resume")
            await asyncio.to_thread(
                wait_until, lambda: value(running, "kvyard_sequences_running") == 6, limit(20), "six"
            )
            await asyncio.to_thread(reload, 2, "in force now: max_running")
            await asyncio.to_thread(go_on.touch)
            return await task

        records.clear()
        got = asyncio.run(scene())
        assert all((one.error, one.finishes) == ("", ["length"]) for one in got)
        ran = [record["running"] for record in records.steps]
        assert max(ran) == 6, "those that ran went on"
        assert not any(record["preempted"] for record in records.steps)
        late = [i for i, record in enumerate(records.steps) if record["admitted"] and i > ran.index(6)]
        assert len(late) >= 2, "and the others came in when fewer ran"
        assert max(ran[late[0] :]) <= 2
        check_places(running, 2)
        os.kill(client.status().engine.pid or 0, signal.SIGKILL)
        wait_until(lambda: client.status().engine.restarts == 1, 20, "its end")
        running.wait_ready()
        check_places(running, 2)
        reload(4, "in force now: max_running")
        wait_until(lambda: value(running, "kvyard_limit", limit="running") == 4, 10, "more places")
        check_places(running, 4)
        reload(9, "max_running is 6 now (9 needs a restart)")
        wait_until(lambda: value(running, "kvyard_limit", limit="running") == 6, 10, "as many as at the start")
        check_places(running, 6)
        (row,) = [row for row in client.call("config.show") if row["name"] == "max_running"]
        assert (row["value"], row["after_restart"]) == (6, 9)


def check_places(running: DaemonProcess, places: int) -> None:
    """Everybody who shows the limit shows this one."""
    with Client(running.socket) as client:
        assert client.call("policy.show")["in_force"]["max_running"] == places
        assert client.status().limits.max_running == places
    assert value(running, "kvyard_limit", limit="running") == places
    assert f"0/{places} " in running.cli("status").stdout
