"""Who is served when many want to be: decoders or prompts, cold or hot, urgent or patient, large or small.

One daemon with a quick model; which step served whom is read from the step records.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvyard.control.client import Client

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.metrics import idle_again
from tests.e2e.quick_model import quick_model
from tests.e2e.records import Records, recording
from tests.tui.screen import text, until_text, watching

FLAGS = (
    *("--deterministic", "--dtype", "float32", "--kv-blocks", "160", "--max-step-tokens", "512"),
    *("--max-model-len", "2560", "--prefix-cache"),
)
BLOCKS = 160
BLOCK = 16


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "kvyard.toml"
    path.write_text("max_running = 16\n")
    return path


@pytest.fixture(scope="module")
def running(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    model = quick_model(tmp_path_factory.mktemp("quick"))
    with daemon("--config", str(config), *FLAGS, model=model) as process:
        yield process


@pytest.fixture
def one_place(running: DaemonProcess, client: Client, config: Path) -> Iterator[None]:
    """One sequence runs at a time."""
    places(running, client, config, 1)
    yield
    places(running, client, config, 16)


def places(running: DaemonProcess, client: Client, config: Path, count: int) -> None:
    """Change `max_running` of the live daemon."""
    config.write_text(f"max_running = {count}\n")
    running.process.send_signal(signal.SIGHUP)
    wait_until(lambda: client.status().limits.max_running == count, 10, "the places")


@pytest.fixture(scope="module")
def client(running: DaemonProcess) -> Iterator[Client]:
    with Client(running.socket, timeout=60) as connected:
        yield connected


@pytest.fixture
def records(running: DaemonProcess, client: Client) -> Iterator[Records]:
    with recording(running) as kept:
        idle_again(running)
        kept.clear()
        yield kept
        client.call("resume")


@pytest.fixture
async def http(running: DaemonProcess) -> Any:  # noqa: ANN401 - an async generator fixture
    async with httpx.AsyncClient(base_url=running.base, timeout=120, limits=httpx.Limits(max_connections=200)) as one:
        yield one


class Crowd:
    """Requests that are sent while the daemon is paused, so that all of them are there before the first is served."""

    def __init__(self, http: httpx.AsyncClient, client: Client) -> None:
        self._http = http
        self._client = client
        self.tasks: list[asyncio.Task[httpx.Response]] = []

    async def send(self, prompt: list[int], max_tokens: int, **more: Any) -> int:  # noqa: ANN401 - any JSON value
        """Send one and wait until the daemon has it; its sequence's id."""
        before = {row["id"] for row in self.rows()}
        body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}
        self.tasks.append(asyncio.create_task(self._http.post("/v1/completions", json=body)))
        return await self.newcomer(before)

    async def newcomer(self, before: set[int]) -> int:
        """The id of a sequence that was not there before; waits for it."""
        for _ in range(5000):
            if new := {row["id"] for row in self.rows()} - before:
                return int(new.pop())
            await asyncio.sleep(0.002)
        raise AssertionError("the daemon did not take the request up")

    def rows(self) -> list[dict[str, Any]]:
        """Unfinished sequences."""
        listed: list[dict[str, Any]] = self._client.call("requests", {"limit": 1000})["rows"]
        return listed

    async def served(self) -> None:
        """All of them got all they asked for."""
        for answer in await asyncio.gather(*self.tasks):
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["finish_reason"] == "length"


def prompt(seed: int, length: int) -> list[int]:
    """Different from its first token on for different seeds."""
    return [seed % 250, *((seed * 31 + 7 * i) % 250 for i in range(length - 1))]


async def test_FAIR_02_a_flow_of_prompts_never_stops_those_that_decode(
    http: httpx.AsyncClient, client: Client, records: Records
) -> None:
    """A new prompt as long as the budget in every step, for sixty steps: each decoder gains a token in each."""
    crowd = Crowd(http, client)
    client.call("pause")
    decoders = [await crowd.send(prompt(seed, 8), 90) for seed in range(4)]
    prompts = [await crowd.send(prompt(seed, 512), 1) for seed in range(10, 75)]
    client.call("resume")
    await crowd.served()
    await asyncio.to_thread(records.wait_for, [*decoders, *prompts])
    steps = [record for record in records.steps if record["prompt_tokens"] > 0 and record["decode_tokens"] > 0]
    assert len(steps) >= 60
    gained = Counter(id for record in steps[:60] for id in record["ids"] if id in decoders)
    assert sorted(gained) == decoders
    assert min(gained.values()) >= 60, "the order of the default discipline: those that decode come first"
    assert sum(record["prompt_tokens"] for record in steps[:60]) >= 60 * 500, "and prompts get the rest of each step"


async def test_FAIR_05_a_cold_request_comes_in_although_hot_prefixes_keep_coming(
    http: httpx.AsyncClient, client: Client, records: Records, one_place: None
) -> None:
    """Under the order of the longest cached prefix a cold one is passed over `passes` times and no more."""
    passes = 12
    client.call("policy.swap", {"kind": "discipline", "name": "sglang", "params": {}})
    try:
        client.call("policy.set", {"kind": "admission", "params": {"order": "lpm", "passes": passes}})
        hot = prompt(3, 64)
        warm = await http.post("/v1/completions", json={"model": "smollm2-135m", "prompt": hot, "max_tokens": 1})
        assert warm.status_code == 200
        crowd = Crowd(http, client)
        client.call("pause")
        cold = await crowd.send(prompt(200, 200), 4)
        hot_ones = [await crowd.send([*hot, 1, seed], 4) for seed in range(3 * passes)]
        records.clear()
        client.call("resume")
        hot_ones += [await crowd.send([*hot, 2, seed], 4) for seed in range(5)]  # and they keep coming meanwhile
        await crowd.served()
        await asyncio.to_thread(records.wait_for, [cold, *hot_ones])
        order = records.admissions()
        assert order.index(cold) == passes, "passed over so often, and then it comes"
        assert set(order) == {cold, *hot_ones}
    finally:
        client.call("policy.swap", {"kind": "discipline", "name": "kvyard", "params": {}})


async def test_FAIR_06_an_urgent_request_takes_a_place_from_a_lesser_one(
    running: DaemonProcess, http: httpx.AsyncClient, client: Client, records: Records, config: Path
) -> None:
    """Four of priority 10 hold the four places; priority 0 has its first token in five steps; all end as alone."""
    alone = [(await http.post("/v1/completions", json=patient(seed))).json() for seed in range(4)]
    places(running, client, config, 4)
    crowd = Crowd(http, client)
    try:
        records.clear()
        lesser = [await crowd.send(prompt(seed, 8), 400, **SHOWN, priority=10) for seed in range(4)]
        await asyncio.to_thread(wait_until, lambda: steps_with(records, lesser) >= 20, 30, "step 20")
        # Long enough to be seen in the list of requests on a busy machine too.
        urgent = await crowd.send(prompt(99, 8), 60, **SHOWN, priority=0)
        answers = [(await task).json() for task in crowd.tasks]
        await asyncio.to_thread(records.wait_for, [*lesser, urgent])
    finally:
        places(running, client, config, 16)
    came = records.admitted_in(urgent)
    asked = next(i for i, record in enumerate(records.steps) if i >= 20 and (record["waiting"] or i == came))
    assert came - asked <= 5, "it had its first token in the step that admitted it"
    victims = [p["id"] for record in records.steps for p in record["preempted"] if p["by"] == urgent]
    assert len(victims) == 1
    assert victims[0] in lesser
    for solo, answer in zip(alone, answers[:4], strict=True):
        assert answer["choices"][0]["logits_hashes"] == solo["choices"][0]["logits_hashes"]


SHOWN = {"return_token_ids": True, "return_logits_hash": True, "temperature": 0}


def patient(seed: int) -> dict[str, Any]:
    """A long request, as it is sent alone."""
    return {"model": "smollm2-135m", "prompt": prompt(seed, 8), "max_tokens": 400, "ignore_eos": True, **SHOWN}


def steps_with(records: Records, sequences: list[int]) -> int:
    """Steps so far in which all of these got a token."""
    return sum(set(sequences) <= set(record["ids"]) for record in list(records.steps))


@pytest.mark.parametrize("urgent_first", [True, False])
async def test_FAIR_07_a_small_number_is_more_urgent_at_every_entrance(
    running: DaemonProcess,
    http: httpx.AsyncClient,
    client: Client,
    records: Records,
    one_place: None,
    urgent_first: bool,
) -> None:
    """Of two that wait, by HTTP or the control socket, priority 0 comes before 10; the screen shows them so."""
    crowd = Crowd(http, client)
    client.call("pause")
    pairs = {}
    for entrance in ("http", "socket"):
        for priority in (0, 10) if urgent_first else (10, 0):
            if entrance == "http":
                pairs[entrance, priority] = await crowd.send(prompt(5, 20), 20, priority=priority)
            else:
                pairs[entrance, priority] = await generate(running, crowd, priority)
    async with watching(running.socket, (120, 40)) as (app, pilot):
        await until_text(app, pilot, "4 waiting")
        while app.choice.sort != "priority":
            await pilot.press("s")
        lines = text(app).splitlines()
        at = next(line.index("PRI") for line in lines if "PRI" in line)
        shown = [int(line[at - 1 : at + 4]) for line in lines if "○ waiting" in line]
        assert shown == [0, 0, 10, 10], "the most urgent stand first"
    client.call("resume")
    await crowd.served()
    await asyncio.to_thread(records.wait_for, pairs.values())
    order = [id for id in records.admissions() if id in pairs.values()]
    place = {key: order.index(id) for key, id in pairs.items()}
    for one in ("http", "socket"):
        for other in ("http", "socket"):
            assert place[one, 0] < place[other, 10], (one, other)
    lower = client.call("schema")["methods"]
    assert any("lower is more urgent" in str(method["params"]) for method in lower if method["name"] == "generate")


async def generate(running: DaemonProcess, crowd: Crowd, priority: int) -> int:
    """A request over the control socket; its sequence's id."""
    before = {row["id"] for row in crowd.rows()}

    def call() -> None:
        with Client(running.socket, timeout=30) as own:
            own.call("generate", {"prompt": prompt(9, 20), "max_tokens": 20, "temperature": 0, "priority": priority})

    asyncio.get_running_loop().run_in_executor(None, call)
    return await crowd.newcomer(before)


async def test_FAIR_08_small_ones_neither_pass_a_large_head_nor_is_it_passed_over(
    http: httpx.AsyncClient, client: Client, records: Records
) -> None:
    """The documented rule of the default discipline is the strict order: the head of the queue is a barrier."""
    crowd = Crowd(http, client)
    client.call("pause")
    holder = await crowd.send(prompt(1, (BLOCKS - 25) * BLOCK), 14)
    head = await crowd.send(prompt(2, 30 * BLOCK - 4), 4)
    small = [await crowd.send(prompt(20 + i, BLOCK + 4), 4) for i in range(10)]
    client.call("resume")
    small += [await crowd.send(prompt(60 + late, BLOCK + 4), 4) for late in range(3)]  # they keep coming meanwhile
    await crowd.served()
    await asyncio.to_thread(records.wait_for, [holder, head, *small])
    assert records.admissions()[:2] == [holder, head]
    assert records.admissions()[2:] == small, "and they follow in the order of arrival"
    ended = next(i for i, record in enumerate(records.steps) if holder in dict(record["finished"]))
    assert records.admitted_in(head) - ended <= 2, "it starts as soon as the room is there"
    waited = records.steps[ended - 1]
    assert waited["blocks_used"] <= BLOCKS - 24, "there was room for small ones all the time, and none took it"
    assert waited["waiting"] >= 11
