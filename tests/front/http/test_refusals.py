"""What was not accepted is counted once, under the code that its client got."""

from __future__ import annotations

from typing import Any

import pytest
from kvyard.front.metrics import REFUSAL_CODES
from kvyard.front.service import Refusal

from tests.front.http.conftest import Serve

BODIES: list[dict[str, Any]] = [
    {"prompt": "x", "temperature": -1},
    {"prompt": "x", "max_tokens": "many"},
    {"prompt": [1] * 5000, "max_tokens": 5},
    {"prompt": "x", "max_tokens": 10_000_000},
    {"prompt": "x " * 5000, "max_tokens": 5},
    {"prompt": "x", "model": "another"},
    {"prompt": []},
    {"prompt": [999_999_999]},
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: ",".join(body))
async def test_a_request_that_was_not_accepted_counts_under_its_code(serve: Serve, body: dict[str, Any]) -> None:
    async with serve(" a") as served:
        answer = await served.http.post("/v1/completions", json=body)
        assert 400 <= answer.status_code < 500
        code = answer.json()["error"]["code"]
        assert served.observer.refusals == [code]
        assert code in REFUSAL_CODES


async def test_accepted_ones_do_not_count(serve: Serve) -> None:
    async with serve(" a") as served:
        assert (await served.complete()).status_code == 200
        assert served.observer.refusals == []


async def test_what_the_serving_side_refuses_it_counts_itself(serve: Serve) -> None:
    async with serve(" a") as served:
        served.service.refusal = Refusal(429, "queue_full", "full", 1)
        answer = await served.complete()
        assert (answer.status_code, served.observer.refusals) == (429, [])
