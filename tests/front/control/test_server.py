"""The control server over a real socket: methods, roles, audit, subscriptions, and peers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from kvyard.control.schema import MAX_LINE, METHODS, PROTOCOL, Method
from kvyard.front.control import session as session_module
from kvyard.front.control.listener import SocketError
from kvyard.front.control.server import MAX_SESSIONS, ControlServer
from kvyard.front.operations import Who

from tests.control.desk import record
from tests.front.control.conftest import Served
from tests.front.control.wire import Wire, wire

GOOD: dict[str, dict[str, Any]] = {
    "schema": {},
    "lower": {"role": "operator"},
    "status": {},
    "requests": {"limit": 1},
    "explain": {"request_id": "a"},
    "events": {"limit": 5},
    "subscribe": {"topics": []},
    "policy.list": {},
    "policy.show": {"kind": "admission"},
    "policy.swap": {"kind": "admission", "name": "x", "params": {"rate": 1}},
    "policy.set": {"kind": "admission", "params": {"rate": 2}},
    "policy.release": {"policy": "admission/x"},
    "cancel": {"request_id": "a"},
    "pause": {},
    "resume": {},
    "drain": {"stop": False},
    "dump": {},
    "generate": {"prompt": "hi"},
    "model.list": {},
    "config.show": {},
}


async def settled(check: Any, limit: float = 5.0) -> None:  # noqa: ANN401 - any callable
    """Wait until a condition holds."""
    until = time.monotonic() + limit
    while not check():
        assert time.monotonic() < until, "it never came true"
        await asyncio.sleep(0.01)


async def test_the_greeting(served: Served) -> None:
    async with wire(served.path, greeting=False) as w:
        hello = await w.line()
    assert hello == {"type": "hello", "protocol": PROTOCOL, "version": "9.9.9", "role": "admin", "pid": os.getpid()}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
async def test_every_method_answers(served: Served, method: Method) -> None:
    async with wire(served.path) as w:
        answer = await w.call(method.name, **GOOD[method.name])
    assert "error" not in answer, answer
    assert answer["result"] is not None


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
async def test_unknown_parameters_are_refused_with_the_known_ones(served: Served, method: Method) -> None:
    async with wire(served.path) as w:
        answer = await w.call(method.name, **{**GOOD[method.name], "surprise": 1})
    assert answer["error"]["code"] == "bad-params"
    assert "surprise" in answer["error"]["message"]
    assert all(name in answer["error"]["hint"] for name in method.params)
    assert not served.desk.calls


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("requests", {"limit": "many"}),
        ("policy.swap", {"kind": "admission"}),
        ("policy.swap", {"kind": 3, "name": "x"}),
        ("policy.set", {"kind": "admission", "params": [1]}),
        ("lower", {"role": "king"}),
        ("subscribe", {"topics": ["weather"]}),
        ("subscribe", {"topics": "status"}),
        ("drain", {"stop": "yes"}),
        ("generate", {"prompt": {"a": 1}}),
        ("generate", {}),
    ],
)
async def test_wrong_parameters_are_refused(served: Served, method: str, params: dict[str, Any]) -> None:
    async with wire(served.path) as w:
        answer = await w.call(method, **params)
        assert answer["error"]["code"] == "bad-params", answer
        assert "result" in await w.call("status"), "the session goes on"
    assert not served.desk.calls


async def test_an_unknown_method_is_told(served: Served) -> None:
    async with wire(served.path) as w:
        answer = await w.call("drian")
    assert answer["error"]["code"] == "unknown-method"
    assert "drian" in answer["error"]["message"]


@pytest.mark.parametrize(
    "garbage", [b"\n", b"{}\n", b"[]\n", b'{"id":"x","method":1}\n', b"\xff\xfe\x00\n", b"GET / HTTP\n"]
)
async def test_garbage_gets_an_error_and_the_session_goes_on(served: Served, garbage: bytes) -> None:
    async with wire(served.path) as w:
        await w.raw(garbage)
        answer = await w.line()
        assert (answer["id"], answer["error"]["code"]) == (0, "bad-request")
        assert "result" in await w.call("status")


async def test_an_operations_error_reaches_the_client_whole(served: Served) -> None:
    async with wire(served.path) as w:
        answer = await w.call("cancel", request_id="nobody")
    assert answer["error"] == {
        "code": "unknown-request",
        "message": "there is no unfinished request nobody",
        "hint": "see `kvyard top`",
    }


async def test_a_defect_is_internal_without_a_traceback(served: Served) -> None:
    async with wire(served.path) as w:
        answer = await w.call("policy.swap", kind="admission", name="explode")
        assert answer["error"]["code"] == "internal"
        assert "Traceback" not in json.dumps(answer)
        assert "result" in await w.call("status")


async def test_calls_of_one_session_overlap(served: Served) -> None:
    served.desk.slow = 0.3
    async with wire(served.path) as w:
        swap = await w.send("policy.swap", kind="admission", name="x")
        status = await w.send("status")
        assert (await w.line())["id"] == status
        assert (await w.line())["id"] == swap


async def test_generate_streams_deltas_then_the_whole(served: Served) -> None:
    async with wire(served.path) as w:
        await w.send("generate", prompt="x", stream=True)
        deltas = [await w.event("generate") for _ in range(4)]
        answer = await w.line()
    assert [delta["data"].get("text") for delta in deltas[:2]] == ["Par", "is"]
    assert answer["result"]["text"] == "Paris\x1b[2J!"
    assert answer["result"]["token_ids"] == [0, 1, 2]
    assert answer["result"]["finish_reason"] == "length"


async def test_generate_without_stream_sends_no_events(served: Served) -> None:
    async with wire(served.path) as w:
        await w.send("generate", prompt=[1, 2])
        assert (await w.line())["type"] == "response"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_generation(served: Served, stream: bool) -> None:
    served.desk.endless = True
    async with wire(served.path) as w:
        await w.send("generate", prompt="x", stream=stream)
        await settled(lambda: served.desk.generating == 1)
    await settled(lambda: served.desk.generating == 0, 2.0)


class TestRoles:
    """Who may do what; a role is only ever lowered."""

    async def test_lowering_holds_and_cannot_be_undone(self, served: Served) -> None:
        async with wire(served.path) as w:
            assert (await w.call("lower", role="operator"))["result"] == {"role": "operator"}
            assert (await w.call("drain"))["error"]["code"] == "forbidden"
            assert "result" in await w.call("pause")
            await w.call("lower", role="viewer")
            for name in ("pause", "policy.swap", "cancel", "drain"):
                assert (await w.call(name, **GOOD[name]))["error"]["code"] == "forbidden"
            for role in ("operator", "admin"):
                assert (await w.call("lower", role=role))["error"]["code"] == "forbidden"
            assert "result" in await w.call("status")
        assert [name for name, _, _ in served.desk.calls] == ["pause"]

    async def test_other_sessions_keep_their_role(self, served: Served) -> None:
        async with wire(served.path) as low, wire(served.path) as high:
            await low.call("lower", role="viewer")
            assert "result" in await high.call("pause")

    @pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
    async def test_each_method_needs_the_role_it_lists(
        self,
        served: Served,
        method: Method,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        rank = ["viewer", "operator", "admin"]
        for role in rank:
            monkeypatch.setattr("kvyard.front.control.peer._role", lambda *_, role=role: role)
            params = {"role": "viewer"} if method.name == "lower" else GOOD[method.name]
            async with wire(served.path) as w:
                answer = await w.call(method.name, **params)
            allowed = rank.index(role) >= rank.index(method.role)
            assert ("error" not in answer) == allowed, (role, answer)
            if not allowed:
                assert method.role in answer["error"]["message"] and role in answer["error"]["message"]


class TestAudit:
    """Every change is in the log with who made it."""

    async def test_changes_are_logged_with_uid_pid_and_outcome(self, served: Served) -> None:
        async with wire(served.path) as w:
            await w.call("policy.swap", kind="admission", name="x", params={"rate": 1})
            await w.call("cancel", request_id="nobody")
            await w.call("lower", role="viewer")
            await w.call("drain")
            await w.call("status")
        entries = [event.data for event in served.desk.log.last(100) if event.data["kind"] == "control"]
        assert [(entry["method"], entry["outcome"]) for entry in entries] == [
            ("policy.swap", "ok"),
            ("cancel", "unknown-request"),
            ("drain", "forbidden"),
        ]
        assert entries[0]["who"]["uid"] == os.getuid() and entries[0]["who"]["pid"] == os.getpid()
        assert '"rate": 1' in entries[0]["params"]
        assert "policy.swap" in entries[0]["message"]

    async def test_the_daemon_learns_who_it_was(self, served: Served) -> None:
        async with wire(served.path) as w:
            await w.call("pause")
        name, _, who = served.desk.calls[0]
        assert name == "pause" and isinstance(who, Who) and who.pid == os.getpid() and who.role == "admin"

    async def test_long_parameters_do_not_fill_the_log(self, served: Served) -> None:
        async with wire(served.path) as w:
            await w.call("cancel", request_id="y" * 100_000)
        entry = served.desk.log.last(1)[0].data
        assert len(str(entry["params"])) <= 500


class TestSubscriptions:
    """Status at an interval, step records and log entries as they come; slow readers lose events, not memory."""

    async def test_status_comes_at_once_and_then_at_the_interval(self, served: Served) -> None:
        async with wire(served.path) as w:
            await w.call("subscribe", topics=["status"], interval=0.1)
            times = []
            for _ in range(4):
                event = await w.event("status")
                times.append(time.monotonic())
                assert event["data"]["model"]["id"] == "tiny"
        assert 0.25 < times[3] - times[0] < 5.0

    async def test_steps_and_log_entries(self, served: Served) -> None:
        async with wire(served.path) as w:
            await w.call("subscribe", topics=["steps", "events"])
            await asyncio.sleep(0.05)
            served.desk.steps.publish(record(step=77))
            served.desk.log.add("swap", "aging is in charge", generation=5)
            step = await w.event("steps")
            assert step["data"]["step"] == 77 and step["data"]["ids"] == [1, 2]
            entry = await w.event("events")
            assert entry["data"]["kind"] == "swap" and entry["data"]["generation"] == 5

    async def test_a_second_subscription_replaces_the_first(self, served: Served) -> None:
        async with wire(served.path) as w:
            await w.call("subscribe", topics=["steps"])
            await settled(lambda: len(served.desk.steps) == 1)
            await w.call("subscribe", topics=["events"])
            await settled(lambda: len(served.desk.steps) == 0 and len(served.desk.log.feed) == 1)

    async def test_leaving_ends_the_subscriptions(self, served: Served) -> None:
        async with wire(served.path) as w:
            await w.call("subscribe", topics=["steps", "events", "status"])
            await settled(lambda: len(served.desk.steps) == 1 and len(served.desk.log.feed) == 1)
        await settled(lambda: len(served.desk.steps) == 0 and len(served.desk.log.feed) == 0)

    async def test_a_reader_that_is_behind_loses_events_and_is_told(self, served: Served) -> None:
        before = psutil.Process().memory_info().rss
        big = record(sequences=4000)
        async with wire(served.path) as w:
            await w.call("subscribe", topics=["steps"])
            await settled(lambda: len(served.desk.steps) == 1)
            # Stop reading for good: asyncio's own buffer is cut off by pausing the transport.
            w.writer.transport.pause_reading()  # type: ignore[attr-defined] # of a Unix socket's transport
            for _ in range(3000):
                served.desk.steps.publish(big)
                await asyncio.sleep(0)
            assert psutil.Process().memory_info().rss - before < 64 << 20
            w.writer.transport.resume_reading()  # type: ignore[attr-defined] # as above
            drained = asyncio.create_task(w.event("dropped"))
            while not drained.done():
                served.desk.steps.publish(record())
                await asyncio.sleep(0.01)
            event = await drained
        assert event["data"]["count"] > 100

    async def test_a_failing_status_does_not_end_the_subscription(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        good = served.desk.status
        calls = iter([True, False, False])

        async def sometimes() -> Any:  # noqa: ANN401 - a Status
            if next(calls, False):
                raise RuntimeError("not now")
            return await good()

        monkeypatch.setattr(served.desk, "status", sometimes)
        async with wire(served.path) as w:
            await w.call("subscribe", topics=["status"], interval=0.1)
            assert (await w.event("status"))["data"]["version"] == "9.9.9"


class TestLifecycle09LongLines:
    """LIFECYCLE-09: long requests and replies work, a monstrous line gets an error, and others go on."""

    async def test_a_200_kb_request(self, served: Served) -> None:
        async with wire(served.path) as w:
            answer = await w.call("policy.set", kind="admission", params={"text": "z" * 200_000})
        assert answer["result"]["ok"]
        assert len(str(served.desk.calls[0][1])) > 200_000

    async def test_a_line_of_just_the_limit(self, served: Served) -> None:
        async with wire(served.path) as w:
            frame = json.dumps({"id": 1, "method": "policy.set", "params": {"kind": "a", "params": {"t": ""}}})
            fill = MAX_LINE - len(frame) - 1
            await w.raw(frame.replace('"t": ""', f'"t": "{"q" * fill}"').encode() + b"\n")
            assert (await w.line())["result"]["ok"]

    async def test_a_reply_with_2000_waiting_requests(self, served: Served) -> None:
        served.desk.requests_listed = 2000
        async with wire(served.path) as w:
            answer = await w.call("requests", limit=5000)
        assert len(answer["result"]["rows"]) == 2000
        assert len(json.dumps(answer)) > 200_000

    async def test_a_100_mb_line_gets_a_size_error_and_others_are_unaffected(self, served: Served) -> None:
        async with wire(served.path) as other:
            loop = asyncio.get_running_loop()
            code = await loop.run_in_executor(None, _flood, served.path, 100)
            assert code == "too-large"
            assert "result" in await other.call("status")
        await settled(lambda: served.server.sessions == 0)


def _flood(path: Path, megabytes: int) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(str(path))
        reader = connection.makefile("rb")
        reader.readline()
        chunk = b"a" * (1 << 20)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(megabytes):
                connection.sendall(chunk)
        return str(json.loads(reader.readline())["error"]["code"])


class TestLifecycle10BadConnections:
    """LIFECYCLE-10: no bad connection takes the daemon down or leaves a descriptor behind."""

    @pytest.mark.parametrize("kind", ["half", "garbage", "early", "silent"])
    async def test_a_hundred_of_each(self, served: Served, kind: str) -> None:
        async with wire(served.path) as good:
            before = psutil.Process().num_fds()
            crowd = [await asyncio.open_unix_connection(str(served.path)) for _ in range(100)]
            for _, writer in crowd:
                if kind == "half":
                    writer.write(b'{"id":1,"meth')
                elif kind == "garbage":
                    writer.write(os.urandom(2000) + b"\n")
                elif kind == "early":
                    writer.write(b'{"id":1,"method":"policy.swap","params":{"kind":"a","name":"b"}}\n')
            await asyncio.sleep(0.05)
            assert "result" in await good.call("status")
            for _, writer in crowd:
                writer.transport.abort()
            await settled(lambda: served.server.sessions == 1)
            assert "result" in await good.call("status")
            await settled(lambda: psutil.Process().num_fds() <= before)

    async def test_a_hundred_that_ask_and_never_read(self, served: Served) -> None:
        served.desk.requests_listed = 2000
        ask = b'{"id":1,"method":"requests","params":{"limit":2000}}\n' * 40
        before = psutil.Process().memory_info().rss
        sockets = []
        for _ in range(100):
            connection = socket.socket(socket.AF_UNIX)
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, str(served.path))
            await asyncio.get_running_loop().sock_sendall(connection, ask)
            sockets.append(connection)
        async with wire(served.path) as good:
            assert "result" in await good.call("status")
        grown = psutil.Process().memory_info().rss - before
        for connection in sockets:
            connection.close()
        await settled(lambda: served.server.sessions == 0)
        assert grown < 300 << 20, f"{grown >> 20} MiB for 100 readers that never read"

    async def test_a_reader_that_never_reads_is_cut_off(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(session_module, "STALL_TIMEOUT", 0.3)
        served.desk.requests_listed = 2000
        with socket.socket(socket.AF_UNIX) as connection:
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, str(served.path))
            await loop.sock_sendall(connection, b'{"id":1,"method":"requests","params":{"limit":2000}}\n' * 20)
            await settled(lambda: served.server.sessions == 1)
            await settled(lambda: served.server.sessions == 0)

    async def test_one_more_than_the_limit_is_told_so(self, served: Served) -> None:
        crowd = [await asyncio.open_unix_connection(str(served.path)) for _ in range(MAX_SESSIONS)]
        await settled(lambda: served.server.sessions == MAX_SESSIONS)
        async with wire(served.path, greeting=False) as late:
            assert (await late.line())["error"]["code"] == "busy"
            assert await late.at_end()
        crowd[0][1].close()
        await settled(lambda: served.server.sessions == MAX_SESSIONS - 1)
        async with wire(served.path) as w:
            assert "result" in await w.call("status")
        for _, writer in crowd:
            writer.close()

    async def test_a_half_closed_connection_still_gets_its_answer(self, served: Served) -> None:
        served.desk.slow = 0.2
        async with wire(served.path) as w:
            await w.send("policy.swap", kind="admission", name="x")
            w.writer.write_eof()
            assert (await w.line())["result"]["ok"]
            assert await w.at_end()


async def test_a_change_that_was_begun_is_finished_without_its_caller(served: Served) -> None:
    served.desk.slow = 0.2
    async with wire(served.path) as w:
        await w.send("policy.swap", kind="admission", name="x")
        await asyncio.sleep(0.05)
    await settled(lambda: served.server.sessions == 0)
    await settled(lambda: len(served.desk.calls) == 1)


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
async def test_the_late_answer_to_one_who_left_is_no_defect(
    served: Served, anyio_backend: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's own loop says so with a RuntimeError."""
    ended: list[BaseException | None] = []
    monkeypatch.setattr(session_module, "_report", lambda task: ended.append(task.exception()))
    served.desk.slow = 0.2
    async with wire(served.path) as w:
        await w.send("policy.swap", kind="admission", name="x")
        await asyncio.sleep(0.05)
    await settled(lambda: len(ended) > 0)
    assert len(served.desk.calls) == 1
    assert ended == [None]


async def test_what_runs_policies_is_refused(served: Served) -> None:
    code = (
        "import json, socket, sys\n"
        "sys.stdin.readline()\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(s.makefile().readline())\n"
    )
    pipe = asyncio.subprocess.PIPE
    engine = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(served.path), stdin=pipe, stdout=pipe, start_new_session=True
    )
    served.desk.policy_pids = {1, engine.pid}
    out, _ = await asyncio.wait_for(engine.communicate(b"go\n"), 20)
    assert json.loads(out)["error"]["code"] == "forbidden"
    assert served.desk.log.last(1)[0].data["pid"] == engine.pid


class TestEnd:
    """Closing and taking over."""

    async def test_an_idle_session_does_not_delay_the_end(self, served: Served) -> None:
        async with wire(served.path) as w:
            began = time.monotonic()
            await served.server.close()
            assert time.monotonic() - began < 0.5
            assert await w.at_end()
        assert not served.path.exists()

    async def test_the_answer_to_the_last_call_still_arrives(self, served: Served) -> None:
        async with wire(served.path) as w:
            await w.send("drain")
            await served.desk.drained.wait()
            await served.server.close()
            assert (await w.line())["result"]["draining"]

    async def test_a_second_server_is_refused_and_the_first_goes_on(self, served: Served) -> None:
        with pytest.raises(SocketError):
            ControlServer(served.path, "1")
        async with wire(served.path) as w:
            assert "result" in await w.call("status")

    async def test_connections_made_before_the_start_are_answered_after_it(
        self, folder: Path, served: Served
    ) -> None:
        early = ControlServer(folder / "early" / "s", "1")
        try:
            reader, writer = await asyncio.open_unix_connection(str(early.path))
            await early.start(served.desk)
            assert (await Wire(reader, writer).line())["type"] == "hello"
            writer.close()
        finally:
            await early.close()


async def test_a_line_nested_too_deeply_is_answered(served: Served) -> None:
    async with wire(served.path) as w:
        nested = "[" * 50_000 + "]" * 50_000
        await w.raw(b'{"id":1,"method":"status","params":{"a":' + nested.encode() + b"}}\n")
        answer = await w.line()
        assert answer["error"]["code"] == "bad-request"
        assert "result" in await w.call("status")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (b'{"id":1,"method":"status","method":"drain"}', "method"),
        (b'{"id":1,"method":"status","m\\u0065thod":"drain"}', "method"),
        (b'{"id":1,"id":2,"method":"drain"}', "id"),
        (b'{"id":1,"method":"drain","params":{"stop":false,"stop":true}}', "stop"),
        (b'{"id":1,"method":"policy.set","params":{"kind":"admission","params":{"rate":1,"rate":2}}}', "rate"),
        (b'{"id":1,"method":"status","method":"drain","params":{"x":%s}}' % (b"1" * 5000), "out of range"),
    ],
)
async def test_a_name_given_twice_is_refused(served: Served, line: bytes, name: str) -> None:
    async with wire(served.path) as w:
        await w.raw(line + b"\n")
        answer = await w.line()
        assert answer["error"]["code"] == "bad-request"
        assert name in answer["error"]["message"]
        assert served.desk.calls == []
        assert "result" in await w.call("status"), "the session goes on"
