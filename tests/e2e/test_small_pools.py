"""Pools and windows as small as they come, each on a daemon of its own with the quick model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvyard.control.client import Client

from tests.e2e.daemon import DaemonProcess, daemon
from tests.e2e.metrics import idle_again, value
from tests.e2e.quick_model import quick_model
from tests.e2e.records import recording
from tests.e2e.shapes import run_alone, run_together

BEGIN = 256
PLAIN = ("--deterministic", "--dtype", "float32")


async def test_PREEMPT_11_a_full_host_pool_falls_back_to_recompute(quick_model_folder: Path) -> None:
    wanted = [
        {"prompt": [number] * 8, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": False}
        | {"return_token_ids": True, "return_logits_hash": True}
        for number in range(8)
    ]
    with daemon(*PLAIN, "--kv-blocks", "20", "--swap-blocks", "4", model=quick_model_folder) as running:
        with Client(running.socket, timeout=60) as client:
            how = {"kind": "preemption", "name": "fewest-computed", "params": {"how": "swap"}}
            client.call("policy.swap", how)
            alone = run_alone(running.base, wanted)
            together = await run_together(running.base, wanted, [], at_once=8)
            assert [mine.same(solo) for mine, solo in zip(together, alone, strict=True)] == [True] * 8
            assert [answer.counted for answer in together] == [(8, 200)] * 8
            assert client.call("dump")["engine"]["host_blocks_used"] == 0
        assert value(running, "kvyard_preemptions_total", how="recompute") > 0
        assert value(running, "kvyard_preemptions_total", how="swap") > 0
        assert value(running, "kvyard_engine_restarts_total") == 0
        idle_again(running)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A window of 128 tokens; the tokenizer puts a begin token before a text, the chat template does not."""
    folder = quick_model(tmp_path_factory.mktemp("chatting"))
    template = {"eos_token": "<end>", "bos_token": "<begin>", "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    made = json.loads((folder / "tokenizer.json").read_text())
    first, text = ({"SpecialToken": {"id": "<begin>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}})
    specials = {"<begin>": {"id": "<begin>", "ids": [BEGIN], "tokens": ["<begin>"]}}
    made["post_processor"] = {
        "type": "TemplateProcessing", "single": [first, text], "pair": [first, text], "special_tokens": specials,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(made))
    with daemon(*PLAIN, "--max-model-len", "128", "--kv-blocks", "32", model=folder) as running:
        yield running


def test_TOKENIZER_02_a_raw_prompt_begins_with_the_begin_token_once(chatting: DaemonProcess) -> None:
    answer = chatting.complete("Hello", max_tokens=1, return_token_ids=True)
    ids = answer["choices"][0]["prompt_token_ids"]
    assert (ids[0], ids.count(BEGIN), len(ids)) == (BEGIN, 1, 1 + len("Hello"))
    assert answer["usage"]["prompt_tokens"] == 6


def test_BOUNDARY_03_without_a_limit_the_window_is_used_to_its_last_token(chatting: DaemonProcess) -> None:
    asked = {"messages": [{"role": "user", "content": "x" * 100}], "ignore_eos": True, "temperature": 0}
    with recording(chatting) as records:
        records.clear()
        answer = chatting.post("/v1/chat/completions", asked).json()
        first = records.admissions()[0]
        records.wait_for([first])
        computed = sum(
            granted
            for record in records.steps
            for sequence, granted in zip(record["ids"], record["granted"], strict=True)
            if sequence == first
        )
    counts = {"prompt_tokens": 100, "completion_tokens": 28, "total_tokens": 128}
    assert answer["usage"] == answer["usage"] | counts
    assert answer["choices"][0]["finish_reason"] == "length"
    assert computed == 127, "positions 0 to 126; the last token is told and not computed"
