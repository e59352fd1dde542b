"""`generate` of the control socket: the same request as over HTTP, by the same ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvyard.front.control.methods import parse
from kvyard.front.one_shot import DEFAULT_MAX_TOKENS, run_one
from kvyard.front.operations import GenerateCall, OperationError
from kvyard.front.service import Job
from kvyard.front.text.support import TextSupport

from tests.front.http.scripted import ScriptedService


@pytest.fixture(scope="module")
def support(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> TextSupport:
    """The default model's text side."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVYARD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return TextSupport.load(default_model)


async def job_of(support: TextSupport, **params: Any) -> Job:  # noqa: ANN401 - whatever a client may send
    """The job that a call becomes."""
    service = ScriptedService(lambda job, index: [300])
    call = parse("generate", {"prompt": [5, 6], **params})
    assert isinstance(call, GenerateCall)
    items = [item async for item in run_one(service, support, call)]
    assert items[-1]["usage"]["prompt_tokens"] == len(service.jobs[0].prompt)
    return service.jobs[0]


@pytest.mark.parametrize("seed", [0, 1, -1, -(2**63), 2**63 - 1])
async def test_any_seed_that_http_takes(support: TextSupport, seed: int) -> None:
    assert (await job_of(support, seed=seed)).sampling.seed == seed & (2**63 - 1)


@pytest.mark.parametrize(
    ("asked", "taken"), [(0, 0.0), (1e-6, 0.0), (0.5, 0.5), (101, 101.0), (1e300, 1e6), (None, 1.0)]
)
async def test_any_temperature_that_http_takes(support: TextSupport, asked: float | None, taken: float) -> None:
    assert (await job_of(support, temperature=asked)).sampling.temperature == taken


async def test_null_is_the_default(support: TextSupport) -> None:
    names = ("max_tokens", "temperature", "priority", "chat", "stream")
    job, plain = await job_of(support, seed=None, **dict.fromkeys(names)), await job_of(support)
    assert (job.max_new, job.priority, job.sampling.temperature) == (DEFAULT_MAX_TOKENS, 0, 1.0)
    assert (plain.max_new, plain.priority, plain.sampling.temperature) == (DEFAULT_MAX_TOKENS, 0, 1.0)


async def test_without_a_limit_the_window_is_one(support: TextSupport) -> None:
    assert (await job_of(support, prompt=[5] * 200)).max_new == 256 - 200


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"seed": 2**63},
        {"seed": -(2**63) - 1},
        {"priority": 2**31},
        {"priority": -(2**31) - 1},
        {"prompt": [-1]},
        {"prompt": [2**31]},
        {"prompt": [49152]},
        {"chat": True},
        {"max_tokens": "many"},
    ],
)
async def test_all_that_is_out_of_range_has_one_code(support: TextSupport, wrong: dict[str, Any]) -> None:
    with pytest.raises(OperationError) as caught:
        await job_of(support, **wrong)
    assert caught.value.code == "bad-params"
