"""Fault cases of small pools: who gives way, who comes back, what is left, on daemons with a fixed number of blocks.

Two daemons are shared by all cases: one with 26 blocks that swaps, one with 10. Requests are sent while scheduling is
paused, so that a step meets exactly those that the case speaks of.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import pwd
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from kvyard.control.client import Client, ControlError

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.metrics import idle_again, value
from tests.e2e.records import Records, recording
from tests.e2e.shapes import Answer, ask, run_alone
from tests.e2e.streams import MODEL
from tests.e2e.test_plugin_cases import distribution
from tests.e2e.timing import limit

BLOCK = 16
LARGE, TEN = 26, 10
PLAIN = ("--deterministic", "--dtype", "float32", "--prefix-cache", "--max-running", "64")
HOLDS = {"kvyard": 250, "vllm": 251}
"""For each discipline the token whose sequence holds the engine in a step, when so many of its tokens are there:"""
HELD_AT = 336
SPY = """
from kvyard.policy import Admission, AdmissionPolicy

class Policy(AdmissionPolicy):
    "Reads what no interface tells: the digests of the blocks that the prefix cache knows."
    api = (1, 0)
    index = None

    def admit(self, s):
        for view in s.waiting:
            self.index = view._ledger.index
        return Admission(s.waiting)

    def dump(self):
        named = self.index._blocks.named.nonzero()[0]
        return {"digests": " ".join(self.index.digest(block).hex() for block in named)}
"""


During = Callable[[httpx.AsyncClient, list[asyncio.Task[Answer]]], Awaitable[None]]

WATCH = """
import os, sys

path, modes = os.environ.get("WATCHED_SOCKET"), os.environ.get("WATCHED_MODES")
left, looking = 0, False

def hook(event, args):
    "From when the socket is bound: its mode before every operation that the interpreter tells of, a hundred of them."
    global left, looking
    if left and not looking:
        looking = True
        with open(modes, "a") as told:
            told.write(f"{os.lstat(path).st_mode & 0o7777:o}\\n")
        left, looking = left - 1, False
    elif event == "socket.bind" and args[1] == path:
        left = 100

if path:
    sys.addaudithook(hook)
"""


@dataclass
class Pool:
    """A daemon, a client of its control socket and its steps."""

    running: DaemonProcess
    client: Client
    records: Records
    count: int = 0
    """Of the last run of requests together."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Records of the last run of requests together."""
        return list(self.records.steps)

    def charge(self, kind: str, name: str, **params: Any) -> None:  # noqa: ANN401 - any JSON value
        """Put a policy in charge."""
        self.client.call("policy.swap", {"kind": kind, "name": name, "params": params})

    def alone(self, wanted: list[dict[str, Any]]) -> list[Answer]:
        """Each alone in the engine, none with a hit in the prefix cache."""
        return run_alone(self.running.base, unseen(wanted))

    async def together(
        self, wanted: list[dict[str, Any]], during: During | None = None, in_order: bool = True
    ) -> list[Answer]:
        """All of them, in this order, taken up by one step; `during` runs beside them and may send more."""
        self.records.clear()
        self.client.call("pause")
        limits = httpx.Limits(max_connections=len(wanted) + 4)
        async with httpx.AsyncClient(base_url=self.running.base, timeout=limit(60), limits=limits) as http:
            tasks: list[asyncio.Task[Answer]] = []
            for number, one in enumerate(wanted, 1):
                tasks.append(asyncio.create_task(ask(http, one)))
                if in_order or number == len(wanted):
                    await self.known(number)
            self.client.call("resume")
            if during is not None:
                await during(http, tasks)
            answers = await asyncio.gather(*tasks)
            self.count = len(tasks)
        await asyncio.to_thread(wait_until, self.all_told, limit(20), "the records of their ends")
        return answers

    def all_told(self) -> bool:
        """The end of each of them is recorded."""
        return self.count == sum(len(record["finished"]) for record in self.steps)

    async def known(self, count: int) -> None:
        """Wait until the daemon knows so many unfinished sequences."""

        def there() -> bool:
            return bool(self.client.call("requests", {"limit": 1})["total"] == count)

        await asyncio.to_thread(wait_until, there, limit(20), f"{count} sequences")

    def sequences(self) -> list[int]:
        """Ids of those that came in, in the order of their arrival."""
        return sorted(set(self.admissions()))

    def admissions(self) -> list[int]:
        """Ids in the order in which they came in, and came in again."""
        return self.records.admissions()

    def settled(self) -> None:
        """Nothing is held or wrong any more."""
        idle_again(self.running)
        dump = self.client.call("dump")["engine"]
        assert (dump["host_blocks_used"], dump["blocks"]["used"], dump["faults"]) == (0, 0, [])
        status = self.client.call("status")
        assert status["engine"]["restarts"] == 0
        assert status["quarantine"] == []


@contextlib.contextmanager
def pool_of(running: DaemonProcess) -> Iterator[Pool]:
    """Connect to a daemon and listen to its steps."""
    with Client(running.socket, timeout=60) as client, recording(running) as records:
        yield Pool(running, client, records)


@dataclass
class Gate:
    """The files through which a test holds the engine in a step and lets it go on."""

    held: Path
    go: Path

    def fault(self, token: int) -> dict[str, Any]:
        """For KVYARD_TEST_FAULTS."""
        when = {"point": "model", "action": "hold", "token": token, "computed": HELD_AT}
        return when | {"once": str(self.held), "until": str(self.go)}


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Gate]:
    """One for each discipline."""
    folder = tmp_path_factory.mktemp("gates")
    return {name: Gate(folder / f"{name} held", folder / f"{name} go") for name in HOLDS}


@pytest.fixture(scope="module")
def spy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of modules, a plugin that looks into the engine before all others."""
    folder = tmp_path_factory.mktemp("site")
    distribution(folder, "spying", "[kvyard.admission]\nspy = spying:Policy\n", spying=SPY, sitecustomize=WATCH)
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


@pytest.fixture(scope="module")
def large_pool(quick_model_folder: Path, gates: dict[str, Gate], spy: str) -> Iterator[Pool]:
    faults = [gate.fault(HOLDS[name]) for name, gate in gates.items()]
    env = {"PYTHONPATH": spy, "KVYARD_TEST_FAULTS": json.dumps(faults)}
    flags = (*PLAIN, "--kv-blocks", str(LARGE), "--swap-blocks", str(LARGE))
    with daemon(*flags, model=quick_model_folder, env=env) as running, pool_of(running) as pool:
        yield pool


@dataclass
class Watched:
    """A start under a mask that forbids nothing, and what was seen of its socket meanwhile."""

    modes: list[int]
    stranger: int | None
    """Exit status of another user's attempts to connect; None where this user cannot be another."""
    pool: Pool


@pytest.fixture(scope="module")
def watched(quick_model_folder: Path, spy: str) -> Iterator[Watched]:
    """The daemon with ten blocks, watched as it starts."""
    with open_folder() as folder:
        path = folder / "run" / "kvyard.sock"
        flags = (*PLAIN, "--kv-blocks", str(TEN), "--socket", str(path))
        env = {"PYTHONPATH": spy, "WATCHED_SOCKET": str(path), "WATCHED_MODES": str(folder / "modes")}
        with contextlib.ExitStack() as stack:
            with strangers(path, folder / "ready") as ended, umask(0):
                running = stack.enter_context(daemon(*flags, model=quick_model_folder, env=env))
                (folder / "ready").touch()
                stranger = ended()
            running.socket = path
            modes = [int(mode, 8) for mode in (folder / "modes").read_text().split()]
            yield Watched(modes, stranger, stack.enter_context(pool_of(running)))


@pytest.fixture
def large(large_pool: Pool) -> Iterator[Pool]:
    """The daemon with 26 blocks, in the default discipline before and after."""
    yield from lent(large_pool)


@pytest.fixture
def ten(watched: Watched) -> Iterator[Pool]:
    """The daemon with 10 blocks, in the default discipline before and after."""
    yield from lent(watched.pool)


def lent(pool: Pool) -> Iterator[Pool]:
    """It is idle, complete and in its default discipline after the test."""
    try:
        yield pool
        pool.settled()
    finally:
        pool.client.call("resume")
        pool.charge("discipline", "kvyard")


def body(number: int, prompt: int, output: int, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    tokens = [number, *((number * 37 + at * at * 11) % 250 for at in range(prompt - 1))]
    shown = {"return_token_ids": True, "return_logits_hash": True, "stream": False}
    asked = {"prompt": tokens, "max_tokens": output, "temperature": 0, "ignore_eos": True}
    return {"model": MODEL, **asked, **shown, **more}


SALTS = itertools.count()


def unseen(wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same requests; the prefix cache has nothing for them."""
    return [one | {"cache_salt": f"salt {next(SALTS)}"} for one in wanted]


def check_same(answers: list[Answer], alone: list[Answer]) -> None:
    """Each got what it gets alone, bit for bit in the logits."""
    assert [answer.same(solo) for answer, solo in zip(answers, alone, strict=True)] == [True] * len(alone)


def preempting(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records of the steps in which somebody gave way."""
    return [record for record in steps if record["preempted"]]


# ---- who gives way ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discipline", HOLDS)
async def test_PREEMPT_06_a_preempted_one_comes_back_before_those_that_have_done_no_work(
    large: Pool, gates: dict[str, Gate], discipline: str
) -> None:
    """B outgrows the pool when A has fifty outputs. D waits already; C, who would fit, is sent in just that step."""
    large.charge("discipline", discipline)
    wanted = [body(HOLDS[discipline], 287, 100), body(2, 16, 60), body(3, 160, 5), body(4, 8, 5)]
    gate = gates[discipline]

    async def during(http: httpx.AsyncClient, tasks: list[asyncio.Task[Answer]]) -> None:
        try:
            await asyncio.to_thread(wait_until, gate.held.exists, limit(20), "the step in which A gives way")
            tasks.append(asyncio.create_task(ask(http, wanted[3])))
            await large.known(4)
        finally:
            gate.go.touch()

    answers = await large.together(wanted[:3], during)
    b, a, d, c = large.sequences()
    (record,) = preempting(large.steps)
    (gone,) = record["preempted"]
    assert (gone["id"], gone["by"], gone["tokens"]) == (a, b, 16 + 50 - 1)
    assert large.admissions() == [b, a, a, d, c]
    check_same(answers, large.alone(wanted))


@pytest.mark.parametrize(
    ("priorities", "victim", "kept"),
    [
        pytest.param((5, 5, 0), 1, [0], id="its own victim, which ends the phase"),
        pytest.param((5, 0, 5), 2, [0, 1], id="a victim that comes after"),
        pytest.param((0, 5, 5), 2, [0, 1], id="the newest of two"),
        pytest.param((5, 0, 0), 0, [1, 2], id="a victim that is placed already"),
    ],
)
async def test_PREEMPT_08_nobody_who_gave_way_is_in_the_plan(
    large: Pool, priorities: tuple[int, ...], victim: int, kept: list[int]
) -> None:
    """Three run, one block is free and all three need one in the same step. The first takes it."""
    large.charge("admission", "vllm")
    large.charge("preemption", "vllm", order="priority")
    lengths = (128, 128, 144)
    wanted = [body(n, length, 3, priority=priorities[n]) for n, length in enumerate(lengths)]
    answers = await large.together(unseen(wanted))
    ids = large.sequences()
    first = preempting(large.steps)[0]
    assert [gone["id"] for gone in first["preempted"]] == [ids[victim]]
    assert first["ids"] == [ids[n] for n in kept]
    for record in large.steps:
        assert not {gone["id"] for gone in record["preempted"]} & set(record["ids"])
        assert sum(record["granted"]) == record["prompt_tokens"] + record["decode_tokens"]
    check_same(answers, large.alone(wanted))


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param((96, 96, 96, 96), id="number 2 is placed when number 3 is short"),
        pytest.param((96, 96, 112, 112), id="number 1 is short already"),
    ],
)
async def test_PREEMPT_09_no_innocent_is_skipped_when_a_victim_leaves(large: Pool, lengths: tuple[int, ...]) -> None:
    large.charge("admission", "vllm")
    large.charge("preemption", "vllm", order="priority")
    wanted = [body(n, length, 3, priority=9 if n == 1 else 0) for n, length in enumerate(lengths)]
    answers = await large.together(unseen(wanted))
    one, two, three, four = large.sequences()
    first = preempting(large.steps)[0]
    assert [gone["id"] for gone in first["preempted"]] == [two]
    assert dict(zip(first["ids"], first["granted"], strict=True)) == {one: 1, three: 1, four: 1}
    check_same(answers, large.alone(wanted))


async def test_PREEMPT_13_a_restored_one_and_the_cache_hold_the_right_blocks(large: Pool) -> None:
    """A goes out to the host pool and comes back beside B, with whom it shares 64 tokens; when it has ended, others

    push everything that nobody holds out of the cache, while B goes on.
    """
    large.charge("admission", "vllm", batch=3)
    large.charge("preemption", "fewest-computed", how="swap")
    shared = body(1, 64, 1)["prompt"]
    a, b = (body(1, 0, output) | {"prompt": shared + tail} for tail, output in (([1] * 5, 70), ([2] * 6, 220)))
    presses = body(3, 140, 100)
    others = [body(4 + number, 90, 4) for number in range(24)]
    wanted = [a, b, presses, *others]
    run_alone(large.running.base, [b | {"max_tokens": 1}])
    evicted = large.client.call("dump")["engine"]["evicted_blocks"]
    faults: list[str] = []

    async def during(http: httpx.AsyncClient, tasks: list[asyncio.Task[Answer]]) -> None:
        while not tasks[1].done():
            faults.extend(large.client.call("dump")["engine"]["faults"])
            await asyncio.sleep(0.02)

    answers = await large.together(wanted, during)
    assert faults == [], "no block with two owners, no count below nothing"
    assert large.client.call("dump")["engine"]["evicted_blocks"] > evicted + LARGE
    ids, steps = large.sequences(), large.steps
    assert [answer.cached for answer in answers[:2]] == [64, 64]
    assert {gone["how"] for record in steps for gone in record["preempted"] if gone["id"] == ids[0]} == {"swap"}
    ends = [next(at for at, record in enumerate(steps) if id in dict(record["finished"])) for id in ids[:2]]
    after = {pair[0] for record in steps[ends[0] + 1 : ends[1]] for pair in record["admitted"]}
    assert len(after) >= 10, "six blocks for each of them, of the seven to eleven that B leaves"
    check_same(answers, large.alone(wanted[:3]) + run_alone(large.running.base, others))


@pytest.mark.parametrize(
    ("name", "prompt", "outputs"), [("ten", 46, 14), pytest.param("large", 8, 200, marks=pytest.mark.slow)]
)
async def test_PREEMPT_07_nobody_is_preempted_again_and_again(
    request: pytest.FixtureRequest, name: str, prompt: int, outputs: int
) -> None:
    """64 at once in a pool for two of them; the log says little of it."""
    pool: Pool = request.getfixturevalue(name)
    wanted = [body(number % 4, prompt, outputs) for number in range(64)]
    lines, began = pool.running.log.count("preempt"), time.monotonic()
    answers = await pool.together(unseen(wanted), in_order=False)
    assert pool.running.log.count("preempt") - lines <= 5 * (time.monotonic() - began)
    assert [answer.counted for answer in answers] == [(prompt, outputs)] * 64
    times = Counter(gone["id"] for record in pool.steps for gone in record["preempted"])
    assert 0 < max(times.values()) <= 8
    assert all(record["ids"] for record in pool.steps if record["running"]), "somebody advances in each step"
    check_same(answers, pool.alone(wanted[:4]) * 16)


# ---- what fits -------------------------------------------------------------------------------------------------


async def test_BOUNDARY_06_two_that_fit_exactly_never_preempt_each_other(ten: Pool) -> None:
    """Prompts of 16 and 64 outputs: 79 tokens in KV each, as the last one needs no place; five blocks each."""
    wanted = [body(number, 16, 64) for number in range(2)]
    for some in (wanted[:1], wanted):
        answers = await ten.together(unseen(some))
        assert most_blocks(ten.steps) == 5 * len(some)
        check_same(answers, ten.alone(some))


def most_blocks(steps: list[dict[str, Any]]) -> int:
    """The most that were held at once; never more than the tokens in KV and the next one need."""
    kv: Counter[int] = Counter()
    most = 0
    for record in steps:
        assert record["preempted"] == []
        kv.update(dict(zip(record["ids"], record["granted"], strict=True)))
        for sequence, _ in record["finished"]:
            del kv[sequence]
        assert sum(-(-tokens // BLOCK) for tokens in kv.values()) <= record["blocks_used"]
        assert record["blocks_used"] <= sum(-(-(tokens + 1) // BLOCK) for tokens in kv.values())
        most = max(most, record["blocks_used"])
    return most


MIB = 1 << 20
HELD = 512 << 20
"""Bytes that another process holds."""


def refused(model: Path, *flags: str) -> str:
    """What a start says that is none."""
    with daemon(*flags, model=model, wait=False) as process:
        assert process.process.wait(limit(30)) in {2, 6}
        assert "Traceback" not in process.log
        return process.log


@contextlib.contextmanager
def holding(size: int) -> Iterator[None]:
    """Another process has so much memory, and has written to all of it."""
    code = f"held = b'1' * {size}; print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield
        process.kill()


@pytest.fixture(scope="module")
def told(quick_model_folder: Path) -> tuple[int, int]:
    """Beside a process with half a GiB far too large a pool is asked for: MiB that are free, and the most blocks."""
    with holding(HELD):
        log = refused(quick_model_folder, "--kv-blocks", "1000000000")
    found = re.search(r"1000000000 KV blocks take \d+ MiB and (\d+) MiB are free", log)
    most = re.search(r"ask for at most (\d+) with --kv-blocks", log)
    assert found is not None, log
    assert most is not None, log
    return int(found[1]), int(most[1])


def test_MEMORY_02_what_another_process_holds_is_not_free(told: tuple[int, int]) -> None:
    assert 0 < told[0] <= (psutil.virtual_memory().total - HELD) // MIB


@pytest.mark.parametrize("blocks", ["0", "-1"])
def test_MEMORY_06_a_size_that_is_none_is_refused(quick_model_folder: Path, blocks: str) -> None:
    assert "kv" in refused(quick_model_folder, "--kv-blocks", blocks)


def test_MEMORY_06_one_block_serves_what_fits_into_it(quick_model_folder: Path) -> None:
    with daemon(*PLAIN, "--kv-blocks", "1", model=quick_model_folder) as running:
        assert running.complete([1] * 10, max_tokens=7, ignore_eos=True)["usage"]["completion_tokens"] == 7
        assert running.post("/v1/completions", {"prompt": [1] * 10, "max_tokens": 8}).status_code == 400
        idle_again(running)


def test_MEMORY_06_all_there_is_serves_or_is_refused(quick_model_folder: Path, told: tuple[int, int]) -> None:
    """As many blocks as were said to fit: by now others may have taken some of them."""
    flags = ("--dtype", "float32", "--kv-blocks", str(told[1]))
    with daemon(*flags, model=quick_model_folder, wait=False) as running:
        wait_until(
            lambda: address(running) or running.process.poll() is not None, limit(60), "a start or its refusal"
        )
        if running.process.poll() is not None:
            assert f"{told[1]} KV blocks take" in running.log
            assert "Traceback" not in running.log
            return
        running.base = address(running)
        assert running.complete([1] * 1000, max_tokens=4, ignore_eos=True)["usage"]["completion_tokens"] == 4
        assert value(running, "kvyard_engine_restarts_total") == 0


def address(running: DaemonProcess) -> str:
    """Where it serves; empty until it does."""
    with contextlib.suppress(OSError, ControlError), Client(running.socket, timeout=10) as client:
        status = client.status()
        return status.address if status.ready else ""
    return ""


def test_MEMORY_05_a_pool_too_small_for_one_request_of_full_length(quick_model_folder: Path, ten: Pool) -> None:
    """A length that was asked for stops the start; the model's own is lowered to what fits."""
    log = refused(quick_model_folder, "--kv-blocks", str(TEN), "--max-model-len", "2048")
    assert "needs 128 KV blocks and the pool has 10" in log
    assert "161" in log
    assert ten.running.get("/v1/models").json()["data"][0]["max_model_len"] == 161
    assert ten.running.complete([1] * 100, max_tokens=61, ignore_eos=True)["usage"]["completion_tokens"] == 61
    assert ten.running.post("/v1/completions", {"prompt": [1] * 100, "max_tokens": 62}).status_code == 400


# ---- what a start makes ----------------------------------------------------------------------------------------


def test_PREFIX_02_digests_are_long_and_new_with_every_start(large: Pool, ten: Pool) -> None:
    """The same first block on two daemons."""
    one, other = (new_digest(pool, body(9, 17, 1)["prompt"]) for pool in (large, ten))
    assert len(one) == len(other) >= 16
    assert one != other


def new_digest(pool: Pool, prompt: list[int]) -> bytes:
    """The digest under which the one full block of a prompt becomes known."""
    pool.charge("admission", "spy")
    pool.running.complete([8] * 17, max_tokens=1)  # so that the spy has seen the index
    before = digests(pool)
    pool.running.complete(prompt, max_tokens=1)
    (new,) = digests(pool) - before
    pool.running.complete(prompt, max_tokens=1)
    assert new in digests(pool) <= before | {new}, "the same content has the same name"
    return bytes.fromhex(new)


def digests(pool: Pool) -> set[str]:
    """Of the blocks that the prefix cache knows."""
    state = pool.client.call("dump")["engine"]["policies"]["admission"]["state"]
    return set(state["digests"].split())


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    """This process's mask, which what it starts inherits."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter."""
    with tempfile.TemporaryDirectory(prefix="kvyard-open-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextlib.contextmanager
def strangers(path: Path, ready: Path) -> Iterator[Callable[[], int | None]]:
    """Another user tries to connect every millisecond, and once more when the file `ready` is there.

    What it yields waits for the end of that: 0 when no connection came about and the last try was forbidden.
    """
    if os.geteuid() != 0:
        yield lambda: None
        return
    nobody = pwd.getpwnam("nobody")
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(nobody.pw_gid)
        os.setuid(nobody.pw_uid)
        os._exit(try_to_connect(path, ready))
    waited: list[int] = []

    def ended() -> int:
        waited.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return waited[0]

    try:
        yield ended
    finally:
        if not waited:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def try_to_connect(path: Path, ready: Path) -> int:
    """0 when it never succeeds and is forbidden in the end, 1 when it succeeds, else 2."""
    last = False
    while not last:
        last = ready.exists()
        with socket.socket(socket.AF_UNIX) as stranger:
            found = stranger.connect_ex(str(path))
        if found == 0:
            return 1
        time.sleep(0.001)
    return 0 if found == errno.EACCES else 2


def test_LIFECYCLE_08_the_socket_is_never_open_to_others_under_a_loose_umask(watched: Watched) -> None:
    path = watched.pool.running.socket
    assert watched.modes, "it was seen"
    assert all(mode & ~0o660 == 0 for mode in watched.modes), [oct(mode) for mode in watched.modes]
    assert stat.S_IMODE(path.lstat().st_mode) == 0o660
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert watched.stranger in {0, None}, "another user got in"
