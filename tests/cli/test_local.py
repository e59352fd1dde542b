"""Commands that need no daemon: config, model, and what serve refuses before it starts."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from kvyard.front.settings import Settings

from tests.cli.conftest import Cli
from tests.front.models.index import gguf, hf_folder


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


class TestConfig:
    """Showing and checking."""

    def test_show_lists_every_setting(self, lonely: Cli) -> None:
        rows = lonely("config", "show", "--json").json
        assert [row["name"] for row in rows] == list(Settings.model_fields)
        assert "ORIGIN" not in lonely("config", "show").out

    def test_origins(self, lonely: Cli, tmp_path: Path) -> None:
        file = write(tmp_path / "k.toml", "port = 81\nmax_running = 7\n")
        out = lonely("config", "show", "--origin", "--config", str(file), KVYARD_PORT="82").out
        lines = {line.split()[0]: line for line in out.splitlines()}
        assert lines["port"].split()[1] == "82" and lines["port"].endswith("environment KVYARD_PORT")
        assert lines["max_running"].split()[1] == "7" and lines["max_running"].endswith(f"file {file}")
        assert lines["host"].endswith("default")

    def test_a_good_file(self, lonely: Cli, tmp_path: Path) -> None:
        done = lonely("config", "check", str(write(tmp_path / "k.toml", "port = 81\n")))
        assert done.status == 0 and "good" in done.out

    def test_a_bad_file(self, lonely: Cli, tmp_path: Path) -> None:
        file = write(tmp_path / "k.toml", "prot = 81\nport = 'x'\n")
        done = lonely("config", "check", str(file))
        assert done.status == 6
        assert "did you mean port?" in done.err and "port = 'x'" in done.err and str(file) in done.err
        as_json = lonely("config", "check", str(file), "--json")
        assert as_json.status == 6
        assert as_json.json["ok"] is False and len(as_json.json["problems"]) == 2

    def test_everything_that_serve_would_read(self, lonely: Cli) -> None:
        assert lonely("config", "check").status == 0
        done = lonely("config", "check", KVYARD_PORT="x")
        assert done.status == 6 and "environment KVYARD_PORT" in done.err

    def test_a_variable_that_is_no_setting_is_a_problem(self, lonely: Cli) -> None:
        done = lonely("config", "check", KVYARD_PORTT="3")
        assert done.status == 6
        assert "KVYARD_PORTT (environment): there is no such setting; did you mean KVYARD_PORT?" in done.err
        as_json = lonely("config", "check", "--json", KVYARD_PORTT="3")
        assert (as_json.status, as_json.json["unknown_variables"]) == (6, ["KVYARD_PORTT"])
        others = {"KVYARD_TEST_MODEL": "x", "KVYARD_CACHE_DIR": "y", "KVYARD_TRACEBACK": "1"}
        assert lonely("config", "check", **others).status == 0

    def test_show_of_a_bad_configuration(self, lonely: Cli) -> None:
        assert lonely("config", "show", KVYARD_PORT="x").status == 6


class TestKey:
    """Making and listing API keys."""

    def test_a_key_and_its_line(self, lonely: Cli) -> None:
        made = lonely("key", "new", "ann", "--tenant", "blue", "--json").json
        assert made["key"].startswith("kv-") and made["line"].startswith("ann:blue:sha256$") and made["file"] is None
        assert made["key"] not in made["line"]
        text = lonely("key", "new", "bob").out
        assert "kv-" in text and "bob::sha256$" in text

    def test_lines_are_added_to_a_private_file(self, lonely: Cli, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        first = lonely("key", "new", "ann", "--file", str(file)).out
        assert "sha256" not in first and str(file) in first
        assert file.stat().st_mode & 0o777 == 0o600
        file.write_text(file.read_text().rstrip())  # as an editor may leave it
        lonely("key", "new", "bob", "--tenant", "t", "--file", str(file))
        assert lonely("key", "list", str(file), "--json").json == [
            {"name": "ann", "tenant": "ann"},
            {"name": "bob", "tenant": "t"},
        ]
        again = lonely("key", "new", "ann", "--file", str(file))
        assert again.status == 1 and "already" in again.err and again.out == ""
        assert len(file.read_text().splitlines()) == 2

    def test_what_cannot_be(self, lonely: Cli, tmp_path: Path) -> None:
        assert lonely("key", "new", "a:b").status == 2
        assert lonely("key", "list", str(tmp_path / "none")).status == 1
        assert lonely("key", "new", "a", "--file", str(tmp_path / "no" / "k")).status == 1

    def test_a_bad_file_is_a_bad_configuration(self, lonely: Cli, tmp_path: Path) -> None:
        file = write(tmp_path / "k", "nonsense\n")
        for words in (("config", "check"), ("serve",)):
            done = lonely(*words, KVYARD_API_KEY_FILE=str(file))
            assert done.status == 6 and "line 1" in done.err and "nonsense" not in done.err, done

    def test_a_pipe_is_refused_at_once(self, lonely: Cli, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        for words in (("key", "new", "ann", "--file", str(pipe)), ("key", "list", str(pipe))):
            done = lonely(*words)
            assert done.status == 1 and "no regular file" in done.err and "sha256" not in done.out, done
        for variable in ("KVYARD_API_KEY_FILE", "KVYARD_CONFIG"):
            done = lonely("serve", **{variable: str(pipe)})
            assert done.status == 6 and f"{pipe}: it is no regular file" in done.err, done

    def test_config_show_tells_the_path_alone(self, lonely: Cli, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        secret = lonely("key", "new", "ann", "--file", str(file), "--json").json["key"]
        shown = lonely("config", "show", "--json", KVYARD_API_KEY_FILE=str(file)).out
        assert str(file) in shown and secret not in shown and "sha256$" not in shown


class TestModel:
    """Listing, inspecting, and errors of pulling; the pulling itself has its own tests."""

    def test_list(self, lonely: Cli, tmp_path: Path) -> None:
        (row,) = lonely("model", "list", "--model-dir", str(tmp_path), "--json").json
        assert row["id"] == "smollm2-135m" and row["pulled"] is False and row["path"] is None
        (tmp_path / "mine.gguf").write_bytes(gguf(10))
        out = lonely("model", "list", KVYARD_MODEL_DIR=str(tmp_path)).out
        assert "not pulled" in out and "mine" in out

    def test_inspect_a_folder(self, lonely: Cli, tmp_path: Path) -> None:
        folder = hf_folder(tmp_path / "m")
        done = lonely("model", "inspect", str(folder), "--json")
        assert done.json["family"] == "llama" and done.json["parameters"] == 35
        text = lonely("model", "inspect", str(folder), "--metadata").out
        assert "context     128 tokens" in text and "model_type = llama" in text

    def test_inspect_what_is_not_there(self, lonely: Cli) -> None:
        done = lonely("model", "inspect", "nothing")
        assert done.status == 5 and "model list" in done.err

    def test_inspect_what_is_damaged(self, lonely: Cli, tmp_path: Path) -> None:
        (tmp_path / "x.gguf").write_bytes(b"GGUF\x03")
        done = lonely("model", "inspect", str(tmp_path / "x.gguf"))
        assert done.status == 5 and "cannot be read" in done.err

    def test_pull_an_unknown_name(self, lonely: Cli) -> None:
        done = lonely("model", "pull", "gpt-9", "--json")
        assert done.status == 5 and "smollm2-135m" in json.loads(done.err)["error"]["hint"]

    def test_pull_without_network(self, lonely: Cli, tmp_path: Path) -> None:
        done = lonely(
            "model", "pull", "smollm2-135m", "--model-dir", str(tmp_path), PIP_INDEX_URL="http://127.0.0.1:9/simple/",
            PIP_CONFIG_FILE="/dev/null", PIP_FIND_LINKS="", PIP_RETRIES="0",
        )  # fmt: skip
        assert done.status == 5
        assert "could not be reached" in done.err and "--model PATH" in done.err


class TestServe:
    """What is refused before anything slow is tried."""

    @pytest.mark.parametrize(
        ("words", "status"),
        [
            (("--port", "x"), 2),
            (("--dtype", "float16"), 2),
            (("--max-running", "0"), 2),
            (("--no-such-flag",), 2),
            (("--config", "/no/such.toml"), 6),
        ],
        ids=str,
    )
    def test_wrong_flags(self, lonely: Cli, words: tuple[str, ...], status: int) -> None:
        done = lonely("serve", *words)
        assert done.status == status
        assert words[0] in done.err or words[1] in done.err

    def test_a_wrong_variable_is_a_wrong_configuration(self, lonely: Cli) -> None:
        done = lonely("serve", KVYARD_PORT="x")
        assert done.status == 6 and "environment KVYARD_PORT" in done.err

    @pytest.mark.parametrize("columns", ["80", "400"])
    def test_help_has_a_flag_for_every_setting(self, lonely: Cli, columns: str) -> None:
        out = lonely("serve", "--help", COLUMNS=columns).out
        assert max(map(len, out.splitlines())) <= 100
        # A text goes on in the next line, also behind the hyphen of a long word.
        joined = re.sub(r"\s+", "", out)
        for name, info in Settings.model_fields.items():
            assert f"--{name.replace('_', '-')}" in out
            assert info.description is not None and re.sub(r"\s+", "", info.description) in joined
        assert "[default: smollm2-135m]" in " ".join(out.split())
        assert len(out.splitlines()) < 4 * len(Settings.model_fields), "its texts have most of the width"

    def test_a_model_that_is_not_there(self, lonely: Cli, tmp_path: Path) -> None:
        done = lonely("serve", "--model", str(tmp_path / "none"), "--port", "0")
        assert done.status in (5, 6)
        assert "no model" in done.err and "kvyard model list" in done.err
