"""Commands against a served control socket, as processes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import PROGRAM, Cli, environment

EVERY = [
    ("status",),
    ("events",),
    ("cancel", "r1"),
    ("pause",),
    ("resume",),
    ("dump",),
    ("top", "--once"),
    ("generate", "hello"),
    ("policy", "list"),
    ("policy", "show"),
    ("policy", "swap", "admission", "aging", "rate=0.5"),
    ("policy", "set", "admission", "rate=2"),
    ("policy", "release", "admission/greedy"),
    ("config", "show", "--running"),
]


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_command_answers_in_text_and_in_json(cli: Cli, words: tuple[str, ...]) -> None:
    done = cli(*words)
    assert done.status == 0 and done.out.strip(), done
    as_json = cli(*words, "--json")
    assert as_json.status == 0
    for line in as_json.out.splitlines() if words[0] == "events" else [as_json.out]:
        json.loads(line)


@pytest.mark.parametrize("words", [words for words in EVERY if words != ("policy", "list")], ids=" ".join)
def test_without_a_daemon_each_says_so_with_status_7(lonely: Cli, words: tuple[str, ...], tmp_path: Path) -> None:
    done = lonely(*words)
    assert done.status == 7, done
    assert "no daemon answers at" in done.err and str(tmp_path) in done.err and "kvyard serve" in done.err
    assert done.out == ""
    as_json = lonely(*words, "--json")
    assert json.loads(as_json.err)["error"]["code"] == "not-running" and as_json.status == 7


class TestStatus:
    """What the first screen says, and how fast."""

    def test_the_text(self, cli: Cli) -> None:
        text = cli("status").out
        for words in (
            "kvyard 9.9.9  ready  http://127.0.0.1:8000  up 1 h 2 m", "tiny  llama, float32 on a CPU, deterministic",
            "running  2/256  waiting 3 (blocks 3)", "50 used + 20 cached + 30 free of 100 blocks of 16 (16.0 MiB)",
            "55.5 output tok/s", "12.3 ms", "aging 1.0", "4.5 us", "discipline kvyard, generation 3",
            "quarantine  admission/greedy: raised", "engine-lost: 1",
        ):  # fmt: skip
            assert re.sub(" +", " ", words) in re.sub(" +", " ", text), words

    def test_the_flag_names_the_socket(self, lonely: Cli, socket: Path) -> None:
        for words in (("--socket", str(socket)), (f"--socket={socket}",)):
            assert lonely("status", *words).status == 0

    def test_under_two_tenths_of_a_second(self, cli: Cli) -> None:
        """Measured beside the bare interpreter, so that a loaded machine does not decide."""
        cli("status")
        bare, whole = [], []
        for _ in range(5):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", "pass"], check=True, env=environment())
            bare.append(time.perf_counter() - began)
            began = time.perf_counter()
            assert cli("status").status == 0
            whole.append(time.perf_counter() - began)
        idle = 0.2 if os.getloadavg()[0] < 1.5 else 0.6
        print(f"status {statistics.median(whole):.3f} s, bare interpreter {statistics.median(bare):.3f} s")
        assert min(whole) < idle
        assert statistics.median(whole) < max(0.2, 12 * statistics.median(bare)), whole

    def test_it_imports_nothing_heavy(self, socket: Path) -> None:
        code = (
            "import sys; from kvyard.cli.main import main; status = main(['status']);"
            "heavy = {'typer', 'pydantic', 'asyncio', 'torch', 'numpy', 'rich', 'prometheus_client', 'textual'};"
            "print(sorted(heavy & set(sys.modules))); sys.exit(status)"
        )
        env = environment(KVYARD_SOCKET=str(socket))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        assert done.returncode == 0 and done.stdout.endswith("[]\n"), done.stdout[-200:]

    def test_no_command_imports_torch(self) -> None:
        code = (
            "import sys; from kvyard.cli.app import MODULES, build; build(); "
            "print([name for name in ('torch', 'textual', 'kvyard.engine') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
        assert done.stdout == "[]\n", done


class TestPolicy:
    """Listing and swapping."""

    def test_the_list_marks_what_is_active_and_what_is_broken(self, cli: Cli) -> None:
        out = cli("policy", "list").out
        assert re.search(r"^\* +admission +aging .*Priority with aging\.$", out, re.MULTILINE)
        assert re.search(r"^! +admission +broken .*written for API 2\.0$", out, re.MULTILINE)
        assert "bad-package 0.1" in out

    def test_without_a_daemon_the_installed_ones_are_listed(self, lonely: Cli) -> None:
        listing = lonely("policy", "list", "--json").json
        kinds = {row["kind"] for row in listing["policies"]}
        assert kinds >= {"admission", "preemption", "prefill", "discipline"}
        assert not any(row["active"] for row in listing["policies"])
        assert "aging" in lonely("policy", "list").out

    def test_a_named_daemon_must_be_there(self, lonely: Cli) -> None:
        assert lonely("policy", "list", "--socket", "/no/such").status == 7

    def test_a_swap_tells_who_is_in_charge(self, cli: Cli) -> None:
        done = cli("policy", "swap", "admission", "fcfs", "--json")
        assert done.json["current"] == {"admission": "fcfs"}
        assert (
            "in charge since step 55: admission fcfs (generation 4)" in cli("policy", "swap", "admission", "fcfs").out
        )

    def test_a_swap_tells_how_long_no_step_ran(self, cli: Cli) -> None:
        done = cli("policy", "swap", "admission", "heavy")
        words = "in charge since step 55: admission heavy (generation 4; no step ran for 2.34 s)\na long pause\n"
        assert done.out == words
        assert cli("policy", "swap", "admission", "heavy", "--json").json["pause_ms"] == 2340.0

    def test_set_answers_with_what_it_set(self, cli: Cli) -> None:
        assert (
            cli("policy", "set", "admission", "rate=2").out
            == "admission aging: rate=2 since step 56 (generation 4)\n"
        )

    def test_a_refused_swap_is_an_error_that_says_what_stays(self, cli: Cli) -> None:
        done = cli("policy", "swap", "admission", "broken")
        assert done.status == 1
        assert "written for API 2.0" in done.err and "still is" in done.err

    @pytest.mark.parametrize("word", ["novalue", "=5", ""])
    def test_a_parameter_without_a_value_is_a_usage_error(self, cli: Cli, word: str) -> None:
        done = cli("policy", "set", "admission", word)
        assert done.status == 2 and "name=value" in done.err

    def test_set_needs_a_parameter(self, cli: Cli) -> None:
        assert cli("policy", "set", "admission").status == 2

    def test_an_unknown_kind_is_told(self, cli: Cli) -> None:
        done = cli("policy", "show", "weather")
        assert done.status == 1 and "no weather policy" in done.err


class TestEvents:
    """The log and its tail."""

    def test_lines_have_time_kind_and_message(self, cli: Cli) -> None:
        out = cli("events", "--limit", "1000").out
        assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  start     the front started$", out, re.MULTILINE)

    def test_follow_goes_on(self, socket: Path) -> None:
        env = environment(KVYARD_SOCKET=str(socket), PYTHONUNBUFFERED="1")
        words = [*PROGRAM, "events", "--follow", "--limit", "0", "--json"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as process:
            assert process.stdout is not None
            lines = [json.loads(process.stdout.readline()) for _ in range(3)]
            process.send_signal(signal.SIGINT)
            process.stdout.read()
        assert [line["data"]["kind"] for line in lines] == ["engine"] * 3
        assert process.returncode == 130

    @pytest.mark.parametrize("reader", ["head -n 1", "(sleep 1; head -n 1)", "(sleep 0.3; read -r line; echo $line)"])
    def test_a_reader_that_leaves_ends_it_quietly(self, socket: Path, reader: str) -> None:
        """Also when all that there is was written before."""
        command = f"{PROGRAM[0]} events --follow --limit 3 | {reader}"
        done = subprocess.run(
            ["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60,
            env=environment(KVYARD_SOCKET=str(socket)),
        )  # fmt: skip
        assert done.stdout.count("\n") == 1 and done.stderr == ""


class TestGenerate:
    """One request."""

    def test_the_text_is_written_as_it_is(self, cli: Cli) -> None:
        assert cli("generate", "capital?").out == "Paris\x1b[2J!\n"

    def test_a_terminal_is_not_steered_by_a_model(self, socket: Path) -> None:
        seen = on_terminal([*PROGRAM, "generate", "capital?"], socket, until=b"!", times=1)
        assert b"Paris?[2J!" in seen

    def test_from_standard_input(self, cli: Cli) -> None:
        assert cli("generate", "-", stdin="hello").status == 0
        assert cli("generate", "-", stdin="").status == 2

    def test_json_is_the_whole_result(self, cli: Cli) -> None:
        result = cli("generate", "x", "--json").json
        assert result["text"].startswith("Paris") and result["finish_reason"] == "length"

    def test_a_failed_request_is_an_error(self, cli: Cli) -> None:
        done = cli("generate", "x", "--priority", "13")
        assert done.status == 1 and "it died" in done.err

    @pytest.mark.parametrize("words", [("--max-tokens", "0"), ("--temperature", "-1"), ("--seed", "x")])
    def test_impossible_values(self, cli: Cli, words: tuple[str, str]) -> None:
        assert cli("generate", "x", *words).status == 2


class TestTop:
    """The plain screen; the full one is the TUI's."""

    def test_once_lists_the_requests_too(self, cli: Cli) -> None:
        out = cli("top", "--once").out
        assert "LATENCY" in out and re.search(r"REQUEST +STATE +WHY", out) and "req-00001" in out

    def test_plain_goes_on_without_a_terminal(self, socket: Path) -> None:
        env = environment(KVYARD_SOCKET=str(socket))
        words = [*PROGRAM, "top", "--plain", "--json", "--interval", "0.1"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as process:
            assert process.stdout is not None
            lines = [json.loads(process.stdout.readline()) for _ in range(3)]
            process.send_signal(signal.SIGINT)
            process.stdout.read()
        assert all(line["status"]["version"] == "9.9.9" and line["requests"]["total"] == 2 for line in lines)

    def test_plain_on_a_terminal_redraws(self, socket: Path) -> None:
        seen = on_terminal([*PROGRAM, "top", "--plain", "--interval", "0.1"], socket, until=b"LATENCY", times=2)
        assert seen.count(b"\x1b[H\x1b[J") >= 2

    def test_without_a_terminal_it_says_what_to_do(self, cli: Cli) -> None:
        done = cli("top")
        assert done.status == 2 and "--once" in done.err


def on_terminal(words: list[str], socket: Path, until: bytes, times: int) -> bytes:
    """What a command writes to a terminal until it has written something so often."""
    process, terminal = pty.fork()
    if process == 0:
        os.execve(words[0], words, environment(KVYARD_SOCKET=str(socket)))
    seen = b""
    deadline = time.monotonic() + 20
    try:
        with contextlib.suppress(OSError):
            while seen.count(until) < times and time.monotonic() < deadline:
                seen += os.read(terminal, 65536)
    finally:
        os.kill(process, signal.SIGINT)
        os.close(terminal)
        os.waitpid(process, 0)
    return seen


def test_dump_to_a_file(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "dump.json"
    done = cli("dump", "-o", str(path))
    assert done.status == 0 and str(path) in done.out
    assert json.loads(path.read_text())["status"] == "whole"
    failed = cli("dump", "-o", str(tmp_path / "no" / "dump.json"))
    assert failed.status == 1 and "cannot write" in failed.err


def test_an_operations_error_is_told_with_its_hint(cli: Cli) -> None:
    done = cli("cancel", "nobody")
    assert done.status == 1
    assert done.err == "kvyard: there is no unfinished request nobody\n  see `kvyard top`\n"


def test_nothing_that_was_named_by_a_client_reaches_the_terminal_raw(cli: Cli) -> None:
    cli("policy", "swap", "admission", "evil\x1b[31m")
    assert "\x1b" not in cli("events").out


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("nonsense",), "No such command"),
        (("status", "--loud"), "No such option"),
        (("policy",), "Usage"),
        (("policy", "swap", "admission"), "NAME"),
        (("events", "--limit", "-1"), "limit"),
        ((), "Usage"),
    ],
    ids=str,
)
def test_wrong_command_lines(cli: Cli, words: tuple[str, ...], hint: str) -> None:
    done = cli(*words)
    assert done.status == 2
    assert hint in done.err + done.out


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        ("policy swap", "KIND NAME [NAME=VALUE]..."),
        ("policy show", "[POLICY]"),
        ("generate", "PROMPT"),
        ("explain", "REQUEST_ID"),
        ("sim replay", "FILE"),
        ("serve", ""),
    ],
)
def test_a_usage_line_is_written_as_in_the_docs(cli: Cli, words: str, usage: str) -> None:
    first = cli(*words.split(), "--help").out.splitlines()[0]
    assert first == f"Usage: kvyard {words} [OPTIONS] {usage}".rstrip()


def test_help_tells_a_commands_whole_first_paragraph(cli: Cli) -> None:
    said = " ".join(cli("--help").out.split())
    assert "Serve a model in the foreground until Ctrl-C or SIGTERM, which let running requests finish." in said
    assert "..." not in said.partition("Commands:")[2]


def test_help_names_every_command(cli: Cli) -> None:
    from kvyard.cli.app import MODULES

    done = cli("--help")
    assert done.status == 0
    assert all(name in done.out for name in MODULES)
    assert cli("--version").out == "kvyard 0.1.0\n"


@pytest.mark.parametrize("name", ["serve", "status", "policy", "model", "config", "top"])
def test_every_command_has_help(cli: Cli, name: str) -> None:
    done = cli(name, "--help")
    assert done.status == 0 and "Usage" in done.out


def test_drain_ends_the_daemon(tmp_path: Path) -> None:
    path = tmp_path / "s"
    words = [sys.executable, "-m", "tests.control.desk", str(path)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=root, env=environment()) as daemon:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        done = subprocess.run([*PROGRAM, "drain", "--socket", str(path)], capture_output=True, text=True)
        assert done.returncode == 0 and "draining, then it stops" in done.stdout
        daemon.wait(10)
    assert not path.exists()
