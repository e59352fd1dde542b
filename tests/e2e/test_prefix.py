"""The prefix cache on a live daemon: what is found, by whom, and that it changes no bit of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.daemon import DaemonProcess, daemon, wait_until
from tests.e2e.metrics import idle_again
from tests.e2e.records import recording
from tests.e2e.shapes import Answer, run_alone, run_at_once, run_together
from tests.e2e.streams import MODEL
from tests.e2e.timing import limit

FLAGS = ("--deterministic", "--dtype", "float32", "--prefix-cache", "--max-running", "64")


@pytest.fixture(scope="module")
def cached(quick_model_folder: Path) -> Iterator[DaemonProcess]:
    """A daemon with the prefix cache and room for everything below."""
    with daemon(*FLAGS, "--kv-blocks", "4096", model=quick_model_folder) as running:
        yield running


def prompt_of(length: int, number: int) -> list[int]:
    """`number` makes it another from the second token on."""
    return [7, *((number * 7919 + i * i * 11 + number * i) % 256 for i in range(1, length))]


def body(prompt: list[int], max_tokens: int = 4, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    shown = {"return_token_ids": True, "return_logits_hash": True, "stream": False}
    return (
        {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        | shown
        | more
    )


def ask(running: DaemonProcess, prompt: list[int], **more: Any) -> Answer:  # noqa: ANN401 - any JSON value
    (answer,) = run_alone(running.base, [body(prompt, **more)])
    return answer


def all_of(running: DaemonProcess, wanted: list[dict[str, Any]]) -> list[Answer]:
    return asyncio.run(run_together(running.base, wanted, [], at_once=50))


def test_PREFIX_08_a_hit_just_past_a_blocks_end(cached: DaemonProcess) -> None:
    for length, found in ((16, 0), (17, 16), (32, 16), (33, 32)):
        prompt = prompt_of(length, 1000 + length)
        cold, warm = ask(cached, prompt), ask(cached, prompt)
        assert (cold.cached, warm.cached) == (0, found), f"a prompt of {length} tokens"
        assert cold.same(warm)


def test_PREFIX_11_warm_and_cold_have_the_same_logits(cached: DaemonProcess) -> None:
    lengths = [17 + (i * 183) // 99 for i in range(100)]
    wanted = [body(prompt_of(length, i), 32, cache_salt="11") for i, length in enumerate(lengths)]
    cold, warm = all_of(cached, wanted), all_of(cached, wanted)
    assert [answer.cached for answer in cold] == [0] * 100
    assert [answer.cached for answer in warm] == [(length - 1) // 16 * 16 for length in lengths]
    assert [mine.same(other) for mine, other in zip(cold, warm, strict=True)] == [True] * 100
    idle_again(cached)


def test_PREFIX_14_who_shares_a_beginning_reads_nothing_of_what_follows_it(cached: DaemonProcess) -> None:
    shared = prompt_of(48, 14)
    donor, other = shared + prompt_of(200, 15), [*shared, 1, 2, 3, 4]
    alone = ask(cached, other, cache_salt="alone")
    assert alone.cached == 0
    salts = [f"donor-{i}" for i in range(100)]
    all_of(cached, [body(donor, 1, cache_salt=salt) for salt in salts])
    answers = all_of(cached, [body(other, cache_salt=salt) for salt in salts])
    assert [answer.cached for answer in answers] == [48] * 100
    assert [answer.same(alone) for answer in answers] == [True] * 100


def test_several_sequences_share_the_prompt_and_the_usage_tells_what_the_cache_gave(cached: DaemonProcess) -> None:
    wanted = body(prompt_of(100, 77), n=4, temperature=1.0, seed=3)
    with recording(cached) as records:
        records.clear()
        (cold,) = asyncio.run(run_at_once(cached, [wanted]))
        (warm,) = asyncio.run(run_at_once(cached, [wanted]))
        wait_until(
            lambda: sum(len(record["finished"]) for record in records.steps) >= 8, limit(10), "the last record"
        )
        computed = sum(record["prompt_tokens"] for record in records.steps)
    assert (cold.cached, warm.cached) == (0, 96)
    assert cold.counted == warm.counted == (100, 16)
    assert cold.same(warm)
    assert computed == (100 + 3) + (4 + 3), "the prompt once, and its last token by each"


def test_a_scored_prompt_is_computed_whole(cached: DaemonProcess) -> None:
    prompt = prompt_of(50, 21)
    for asked, found in (({}, 0), ({"echo": True, "logprobs": 1}, 0), ({}, 48)):
        assert ask(cached, prompt, **asked).cached == found


def check_tenants(running: DaemonProcess, number: int, others: int) -> None:
    """`others`: tokens that another tenant finds."""
    prompt = prompt_of(40, number)
    assert ask(running, prompt, user="ann").cached == 0
    assert ask(running, prompt, user="ann").cached == 32
    assert ask(running, prompt, user="bob").cached == others
    assert ask(running, prompt).cached == others
    assert ask(running, prompt, user="ann", cache_salt="x").cached == 0
    assert ask(running, prompt, user="bob", cache_salt="x").cached == others
    assert ask(running, prompt, user="ann", cache_salt="y").cached == 0


def test_tenants_share_nothing_by_default(cached: DaemonProcess) -> None:
    check_tenants(cached, 31, others=0)


def test_without_isolation_a_salt_alone_separates(quick_model_folder: Path) -> None:
    flags = ("--kv-blocks", "256", "--prefix-cache-isolation", "none")
    with daemon(*FLAGS, *flags, model=quick_model_folder) as running:
        check_tenants(running, 32, others=32)


def test_PREFIX_12_a_rewritten_history_finds_what_was_computed_for_its_own_tokens(cached: DaemonProcess) -> None:
    """The sixteenth token is X in turn 1 and Y in turn 2; each prompt finds the block of its own tokens alone."""
    prompt = prompt_of(15, 1200)
    turn = ask(cached, prompt, max_tokens=3)
    made = turn.choices[0].tokens[0]
    mine, other = [*prompt, made, 5, 6], [*prompt, (made + 1) % 256, 5, 6]
    rewritten, again, rewritten_again = ask(cached, other), ask(cached, mine), ask(cached, other)
    assert [answer.cached for answer in (rewritten, again, rewritten_again)] == [0, 16, 16]
    cold = {name: ask(cached, tokens, cache_salt="cold") for name, tokens in (("mine", mine), ("other", other))}
    assert again.same(cold["mine"])
    assert rewritten.same(cold["other"])
    assert rewritten_again.same(cold["other"])
