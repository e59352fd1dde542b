"""`kvyard sim` as a process: JSON for programs, tables for people, and errors that say what to do."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from kvyard.cli import sim
from kvyard.cli.sim import Bar
from kvyard.sim.arrivals import COLUMNS, FIELDS

from tests.cli.conftest import Cli
from tests.sim.loads import AZURE, GOLDEN, MOONCAKE, TRACES

TRACE = str(next(path for path in TRACES if path.stem == "fcfs_pressure"))
SHORT = ("--until", "30", "--rate", "2")


class TestReplay:
    """Decision traces."""

    def test_equal_in_every_step(self, lonely: Cli) -> None:
        done = lonely("sim", "replay", "--discipline", "vllm", TRACE, "--json")
        assert done.json == {"steps": 343, "equal": 343, "first_difference": None}
        assert done.status == 0 and done.err == ""

    def test_a_difference_is_shown_and_told_by_the_status(self, lonely: Cli) -> None:
        golden = str(next(path for path in GOLDEN if path.stem == "tgi"))
        done = lonely("sim", "replay", golden, "-d", "vllm", "--json")
        assert (done.status, done.err) == (1, "")
        assert done.json["equal"] < done.json["steps"] == 12
        assert set(done.json["first_difference"]) == {"step", "field", "expected", "found"}
        done = lonely("sim", "replay", golden, "-d", "vllm")
        assert done.status == 1
        assert "of 12 steps are equal to vllm's" in done.out and "first difference in step" in done.out

    @pytest.mark.parametrize(("files", "stem"), [(GOLDEN, "tgi"), (TRACES, "fcfs_pressure")])
    def test_the_file_says_which_discipline_it_is_of(self, lonely: Cli, files: list[Path], stem: str) -> None:
        done = lonely("sim", "replay", str(next(path for path in files if path.stem == stem)))
        assert done.status == 0
        assert f"equal to {'tgi' if stem == 'tgi' else 'vllm'}'s" in done.out

    def test_files_that_are_no_trace(self, lonely: Cli, tmp_path: Path) -> None:
        path = tmp_path / "t.json"
        path.write_text("{}")
        done = lonely("sim", "replay", str(path), "--json")
        assert done.status == 2
        assert "no decision trace" in json.loads(done.err)["error"]["message"]


class TestRun:
    """One discipline over arrivals."""

    def test_figures_of_the_whole_and_of_each_request(self, lonely: Cli) -> None:
        found = lonely("sim", "run", str(AZURE), *SHORT, "--discipline", "sarathi", "--json").json
        totals, single = found["totals"], found["requests"]
        assert found["discipline"] == "sarathi"
        assert totals["requests"] == len(single) == totals["finished"] > 50
        for name in ("queue_s", "ttft_s", "itl_s", "e2e_s"):
            assert totals[name]["p50"] <= totals[name]["p95"] <= totals[name]["p99"]
        assert {"preemptions", "recomputed_tokens", "goodput"} <= set(totals)
        assert {"queue_s", "ttft_s", "tpot_s", "e2e_s", "preemptions", "recomputed_tokens"} <= set(single[0])

    def test_for_people(self, lonely: Cli) -> None:
        done = lonely("sim", "run", str(AZURE), *SHORT, "--requests")
        assert "recomputed_tokens" in done.out and "llama-8b-h100" in done.out
        assert "WORST ITL" in done.out

    def test_limits_and_parameters(self, lonely: Cli) -> None:
        words = ("--blocks", "900", "--max-running", "16", "--step-tokens", "512", "--max-tokens", "900")
        text = "output-length,admission.quantile=0.9"
        found = lonely("sim", "run", str(AZURE), *SHORT, *words, "-d", text, "--json").json
        assert found["totals"]["mean_running"] <= 16
        assert found["policies"]["admission"]["params"]["quantile"] == 0.9
        assert found["policies"]["admission"]["state"]["outputs"] > 0

    def test_a_policy_of_ones_own_in_a_discipline(self, lonely: Cli) -> None:
        text = "vllm,admission=aging,admission.aging=0.5"
        found = lonely("sim", "run", str(AZURE), *SHORT, "-d", text, "--json").json
        assert found["policies"]["admission"]["name"] == "aging"
        assert found["policies"]["admission"]["params"]["aging"] == 0.5
        assert found["policies"]["preemption"]["name"] == "vllm"

    def test_columns_are_in_the_help_and_others_in_a_note(self, lonely: Cli, tmp_path: Path) -> None:
        said = " ".join(lonely("sim", "run", "--help").out.split())
        for name in (*COLUMNS, *FIELDS):
            assert name in said, name
        path = tmp_path / "a.csv"
        path.write_text("arrival_s,prompt_tokens,output_tokens,deadline\n0,5,2,9\n")
        done = lonely("sim", "run", str(path), "--json")
        assert done.json["totals"]["finished"] == 1
        assert done.err == f"kvyard: note: not read from {path}: deadline\n"

    def test_prefixes_are_shared_where_they_are_known(self, lonely: Cli) -> None:
        found = lonely("sim", "run", str(MOONCAKE), "--until", "10", "--json").json
        assert found["totals"]["cached_tokens"] > 0

    @pytest.mark.parametrize("command", ["run", "replay"])
    def test_a_second_discipline_is_not_taken_silently(self, lonely: Cli, command: str) -> None:
        done = lonely("sim", command, str(AZURE), "-d", "vllm", "-d", "static")
        assert (done.status, done.out) == (2, "")
        assert "one discipline at a time" in done.err and "kvyard sim compare FILE -d vllm -d static" in done.err


class Terminal(io.StringIO):
    """Remembers what it is sent."""

    def isatty(self) -> bool:
        return True

    def shown(self) -> str:
        """What its line holds."""
        return self.getvalue().rpartition("\r\x1b[K")[2]


def test_progress_leaves_the_terminals_line_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sim, "TELL_EVERY", (0.0, 0.0))
    with pytest.raises(RuntimeError), Bar("") as bar:
        bar.of("vllm")(5, 9, 3.0)
        assert terminal.shown() == "vllm: 5 of 9, 3 s of virtual time"
        bar.of("static")(8, 9, 4.0)
        assert terminal.shown() == "static: 8 of 9, 4 s of virtual time"
        raise RuntimeError
    assert terminal.shown() == ""


class TestCompare:
    """Several disciplines."""

    def test_a_table(self, lonely: Cli) -> None:
        out = lonely("sim", "compare", str(AZURE), *SHORT, "-d", "vllm", "-d", "static").out
        lines = out.splitlines()
        assert [line.split()[0] for line in lines[-3:]] == ["DISCIPLINE", "vllm", "static"]

    def test_json(self, lonely: Cli) -> None:
        found = lonely("sim", "compare", str(AZURE), *SHORT, "-d", "vllm", "-d", "sglang", "--json").json
        assert list(found["disciplines"]) == ["vllm", "sglang"]


def test_prefill_against_decode(lonely: Cli) -> None:
    found = lonely("sim", "prefill-vs-decode", "--prompts", "4", "--json").json["virtual"]
    assert list(found) == ["vllm", "sarathi", "sglang", "tgi"]
    assert found["sarathi"]["decode_itl_s"]["p99"] < found["vllm"]["decode_itl_s"]["p99"]
    assert "ITL p50 / p99 / worst ms" in lonely("sim", "prefill-vs-decode", "--prompts", "2").out


def test_machines(lonely: Cli) -> None:
    assert "llama-8b-h100" in lonely("sim", "machines").out
    assert {"name", "doc", "cost", "limits", "objective"} == set(lonely("sim", "machines", "--json").json[0])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", str(AZURE), "-d", "none"), "no discipline 'none'"),
        (("run", str(AZURE), "-d", "vllm,admission.watermark=9"), "watermark"),
        (("run", "/nonexistent/a.csv"), "cannot be read"),
        (("run", str(AZURE), "--machine", "abacus"), "no machine 'abacus'"),
        (("run", str(AZURE), "--rate", "0"), "--rate 0.5 half"),
        (("run", str(AZURE), "--rate", "nan"), "positive factor"),
        (("run", str(AZURE), "-d", "vllm,admission.colour=1"), "this policy has: watermark"),
        (("run", str(AZURE), "--step-tokens", "0"), "--step-tokens is a number of tokens"),
        (("run", str(AZURE), "--blocks", "0"), "blocks is from 1 to 10,000,000, not 0"),
        (("run", str(AZURE), "--blocks", "999999999999"), "blocks is from 1 to 10,000,000"),
        (("run", str(AZURE), "--max-running", "1000000000"), "max_running is from 1 to 100,000"),
        (("run", str(AZURE), "--until", "nan"), "--until is a positive number"),
        (("compare", str(AZURE), "-d", "none"), "no discipline 'none'"),
    ],
)
def test_errors_for_people(lonely: Cli, words: tuple[str, ...], said: str) -> None:
    done = lonely("sim", *words)
    assert done.status == 2
    assert said in done.err and done.out == ""
