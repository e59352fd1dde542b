"""docs/disciplines.md: a paragraph for every discipline, and tables that the commands named there print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from kvyard.cli.app import build
from kvyard.sim import compare as sides
from kvyard.sim import disciplines, prefill_decode
from kvyard.sim.arrivals import COLUMNS, FIELDS, read_arrivals
from kvyard.sim.cost import MACHINES
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "disciplines.md").read_text()
BLOCKS = re.findall(r"```(?:sh)?\n(.*?)\n```", PAGE, re.DOTALL)
COMMAND = next(block for block in BLOCKS if block.startswith("kvyard sim compare"))
TABLE = BLOCKS[BLOCKS.index(COMMAND) + 1].splitlines()
WORDS = shlex.split(COMMAND)[1:]


def given(option: str) -> str:
    return WORDS[WORDS.index(option) + 1]


def cells(line: str) -> tuple[str, ...]:
    return tuple(re.split(r"  +", line.strip()))


def test_every_discipline_has_a_paragraph_with_what_it_gives_up_and_wins() -> None:
    for name in disciplines.names():
        if name == "vllm-priority":
            continue  # a parameter of vllm, named in its paragraph
        paragraph = next((text for text in PAGE.split("\n\n") if f"**{name}**" in text.split(".")[0]), "")
        assert re.search(r"\*Gives?\s+up\*", paragraph), name
        assert re.search(r"\*Wins?\*", paragraph), name


def test_every_default_in_a_paragraph_is_the_parameters() -> None:
    for name in disciplines.names():
        text = next((text for text in PAGE.split("\n\n") if text.startswith(f"**{name}**")), None)
        if text is None or "Parameters:" not in text:
            continue
        policies = disciplines.make(name)
        known = {**policies.admission.params.values(), **policies.prefill.params.values()}
        for parameter, value in re.findall(r"`(\w+)` ([\d.]+)", text.partition("Parameters:")[2]):
            assert float(known[parameter]) == float(value.rstrip(".")), f"{name}: {parameter}"


@pytest.mark.parametrize("name", ["kvyard", "trtllm-no-evict"])
def test_rows_of_the_azure_table(name: str) -> None:
    load = read_arrivals(
        ROOT / WORDS[2],
        until=float(given("--until")),
        rate=float(given("--rate")),
        max_tokens=int(given("--max-tokens")),
    )
    machine = MACHINES[given("--machine")]
    limits = machine.limits
    limits = type(limits)(
        **{field: getattr(limits, field) for field in limits.__slots__}
        | {"blocks": int(given("--blocks")), "swap_blocks": int(given("--swap-blocks"))}
    )
    ((_, totals),) = sides.compare([name], load, machine, limits)
    assert sides.row(name, totals) in [cells(line) for line in TABLE]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_azure_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(build("sim"), WORDS)
    assert done.exit_code == 0
    assert done.stdout.splitlines() == TABLE


def test_the_prefill_table() -> None:
    machine = MACHINES["smollm2-135m-cpu2"]
    page = [cells(line) for block in BLOCKS for line in block.splitlines()]
    for name in prefill_decode.DISCIPLINES:
        assert ("virtual", *prefill_decode.row(name, prefill_decode.measure(name, machine, 8))) in page


def test_every_column_of_arrivals_is_in_the_table() -> None:
    rows = [line.split("|")[1:3] for line in PAGE.partition("## Arrivals")[2].splitlines() if line.startswith("| ")]
    named = [{name for row in rows for name in re.findall(r"`(\w+)`", row[side])} for side in (0, 1)]
    assert named == [set(COLUMNS), set(FIELDS)]
