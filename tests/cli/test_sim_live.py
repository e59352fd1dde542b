"""Live figures on somebody's daemon: what was in charge is put back, with the parameters that were changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvyard.cli import sim_live
from kvyard.cli.errors import CliError
from kvyard.control.client import Client
from kvyard.sim import live

from tests.control.desk import status


class Asked(Client):
    """A client that notes what is put in charge, without a daemon."""

    swaps: list[dict[str, Any]]
    discipline: str | None = "kvyard"

    def __init__(self, path: Path, timeout: float = 0.0) -> None:
        pass

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self) -> Any:  # noqa: ANN401 - a Status
        now = status()
        now.discipline, now.changed = self.discipline, {"admission.aging": 3.0}
        return now

    def call(self, method: str, params: Any = None, timeout: float | None = None) -> Any:  # noqa: ANN401 - as the real one
        assert method == "policy.swap"
        self.swaps.append(params)
        return {"ok": True, "generation": 1, "current": {}, "previous": {}, "step": 1}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> type[Asked]:
    monkeypatch.setattr(Asked, "swaps", [], raising=False)
    monkeypatch.setattr(sim_live, "Client", Asked)
    monkeypatch.setattr(live, "measure", lambda target, prompts: {"prompts": prompts})
    return Asked


def test_discipline_and_parameters_are_put_back(asked: type[Asked]) -> None:
    assert sim_live.measure(Path("s"), ["vllm"], 1) == {"vllm": {"prompts": 1}}
    assert [(swap["name"], swap["params"]) for swap in asked.swaps] == [
        ("vllm", {}),
        ("kvyard", {"admission.aging": 3.0}),
    ]


def test_what_is_mixed_could_not_be_put_back(asked: type[Asked], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Asked, "discipline", None)
    with pytest.raises(CliError, match="mixed"):
        sim_live.measure(Path("s"), ["vllm"], 1)
    assert asked.swaps == []
