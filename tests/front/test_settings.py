"""Settings: priority of the sources, origins, refusals that name where a value came from."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kvyard.front.settings import (
    PREFIX,
    Settings,
    SettingsError,
    change_of,
    check_file,
    check_variables,
    compare,
    load_settings,
    unknown_variables,
)
from pydantic import ValidationError

bounded = hypothesis_settings(deadline=None, max_examples=60)  # a loaded machine is slow, not wrong


@contextlib.contextmanager
def variables(values: dict[str, str]) -> Iterator[None]:
    """The environment without any KVYARD_ variable but these, and without files of this machine."""
    before = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(PREFIX):
            del os.environ[name]
    os.environ.update({"XDG_CONFIG_HOME": "/nonexistent", **values})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    with variables({}):
        yield


def toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def write(folder: Path, **values: object) -> Path:
    path = folder / "kvyard.toml"
    path.write_text("".join(f"{name} = {toml(value)}\n" for name, value in values.items()), encoding="utf-8")
    return path


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "port": st.integers(0, 65535),
    "max_running": st.integers(1, 10_000),
    "kv_blocks": st.integers(1, 10**6),
    "deterministic": st.booleans(),
    "dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
    "host": st.from_regex(r"[a-z0-9.:]{1,20}", fullmatch=True),
    "drain_timeout_s": st.floats(0, 1000, allow_nan=False).map(lambda number: round(number, 3)),
}
SOURCES = ("file", "environment", "flag")


@st.composite
def layers(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """For each source the fields it sets."""
    found: dict[str, dict[str, Any]] = {source: {} for source in SOURCES}
    for name, values in FIELDS.items():
        for source in SOURCES:
            if draw(st.booleans()):
                found[source][name] = draw(values)
    return found


@bounded
@given(layers())
def test_flags_win_over_variables_and_these_over_files(given_: dict[str, dict[str, Any]]) -> None:
    environ = {PREFIX + name.upper(): str(value) for name, value in given_["environment"].items()}
    with tempfile.TemporaryDirectory() as folder, variables(environ):
        path = write(Path(folder), **given_["file"])
        flags = {name: given_["flag"].get(name) for name in FIELDS}
        settings = load_settings(flags, path)
        defaults = Settings()
        for name in FIELDS:
            winner = next((source for source in reversed(SOURCES) if name in given_[source]), None)
            expected = given_[winner][name] if winner else getattr(defaults, name)
            assert getattr(settings, name) == expected
            origins = {
                "flag": f"flag --{name.replace('_', '-')}",
                "environment": f"environment {PREFIX}{name.upper()}",
                "file": f"file {path}",
                None: "default",
            }
            assert settings.origin(name) == origins[winner]


def test_the_defaults_are_good_and_say_so() -> None:
    settings = load_settings()
    assert settings.model == "smollm2-135m"
    assert (settings.host, settings.port, settings.block_size) == ("127.0.0.1", 8000, 16)
    assert settings.kv_blocks is None and not settings.deterministic and not settings.prefix_cache
    assert {row["origin"] for row in settings.describe()} == {"default"}


def test_the_users_file_wins_over_the_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = tmp_path / "system.toml"
    system.write_text("port = 1\nmax_running = 2\n")
    monkeypatch.setattr("kvyard.control.paths.SYSTEM_CONFIG", system)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "kvyard").mkdir()
    user = write(tmp_path / "kvyard", port=3)
    settings = load_settings()
    assert (settings.port, settings.max_running) == (3, 2)
    assert settings.origin("port") == f"file {user}"
    assert settings.origin("max_running") == f"file {system}"


def test_an_explicit_file_replaces_the_default_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "kvyard").mkdir()
    write(tmp_path / "kvyard", max_running=3)
    path = write(tmp_path, port=4)
    settings = load_settings(config=path)
    assert (settings.port, settings.max_running) == (4, Settings().max_running)
    monkeypatch.setenv("KVYARD_CONFIG", str(path))
    assert load_settings().port == 4


@pytest.mark.parametrize("word", ["auto", "AUTO", "none", " auto "])
def test_auto_is_as_if_not_set(word: str) -> None:
    with variables({"KVYARD_KV_BLOCKS": word, "KVYARD_MAX_MODEL_LEN": word, "KVYARD_SERVED_MODEL_NAME": word}):
        settings = load_settings()
    assert settings.kv_blocks is None and settings.max_model_len is None and settings.served_model_name is None


def test_an_empty_variable_counts_as_not_set() -> None:
    with variables({"KVYARD_PORT": ""}):
        settings = load_settings()
    assert settings.port == 8000 and settings.origin("port") == "default"


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    settings = load_settings({"socket": "~/s", "model_dir": "~/models"})
    assert settings.socket == Path("/home/me/s")
    assert settings.model_dir == Path("/home/me/models")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "65536"),
        ("port", "-1"),
        ("port", "http"),
        ("max_running", "0"),
        ("kv_blocks", "0"),
        ("kv_blocks", "many"),
        ("block_size", "0"),
        ("max_model_len", "1"),
        ("max_step_tokens", "-5"),
        ("swap_blocks", "-1"),
        ("dtype", "float16"),
        ("device", "tpu"),
        ("log_level", "loud"),
        ("drain_timeout_s", "-1"),
        ("drain_timeout_s", "nan"),
        ("drain_timeout_s", "inf"),
        ("deterministic", "perhaps"),
        ("socket", "/" + "x" * 120),
    ],
)
class TestRefusals:
    """A refused value is named with its origin, whatever the source; nothing half-read comes out."""

    def test_from_a_flag(self, name: str, value: str) -> None:
        with pytest.raises(SettingsError) as caught:
            load_settings({name: value})
        assert len(caught.value.problems) == 1
        assert f"{name} = {value!r} (flag --{name.replace('_', '-')})" in caught.value.problems[0]

    def test_from_the_environment(self, name: str, value: str) -> None:
        with variables({PREFIX + name.upper(): value}), pytest.raises(SettingsError) as caught:
            load_settings()
        assert f"(environment {PREFIX}{name.upper()})" in caught.value.problems[0]

    def test_from_a_file(self, name: str, value: str, tmp_path: Path) -> None:
        path = write(tmp_path, **{name: value})
        problems = check_file(path)
        assert len(problems) == 1 and f"(file {path})" in problems[0] and problems[0].startswith(name)


class TestFiles:
    """`config check` on files that are wrong in every way."""

    def test_a_good_file(self, tmp_path: Path) -> None:
        assert check_file(write(tmp_path, port=1, deterministic=True, dtype="float32")) == []

    def test_unknown_names_are_told_with_a_guess(self, tmp_path: Path) -> None:
        path = tmp_path / "k.toml"
        path.write_text("prot = 1\nmax-running = 2\nzzz = 3\n[table]\nx = 1\n")
        problems = check_file(path)
        assert len(problems) == 4
        assert "did you mean port?" in problems[0]
        assert "did you mean max_running?" in problems[1]
        assert "kvyard config show" in problems[2]

    def test_all_problems_are_told_at_once(self, tmp_path: Path) -> None:
        path = write(tmp_path, port="x", max_running=0, nonsense=1)
        assert len(check_file(path)) == 3

    @pytest.mark.parametrize("content", [b"port = ", b"port = 1\nport = 2", b"\xff\xfe", b"= 3", b"[a\n"])
    def test_no_toml(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "k.toml"
        path.write_bytes(content)
        (problem,) = check_file(path)
        assert "not valid TOML" in problem and str(path) in problem

    def test_a_missing_file_and_a_folder(self, tmp_path: Path) -> None:
        for path in (tmp_path / "none.toml", tmp_path):
            (problem,) = check_file(path)
            assert "cannot read" in problem and str(path) in problem
        with pytest.raises(SettingsError, match="cannot read"):
            load_settings(config=tmp_path / "none.toml")

    def test_a_pipe_is_refused_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pipe = tmp_path / "kvyard" / "kvyard.toml"
        pipe.parent.mkdir()
        os.mkfifo(pipe)
        assert check_file(pipe) == [f"cannot read the configuration {pipe}: it is no regular file"]
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # where nobody has named it
        for named in (None, pipe):
            with pytest.raises(SettingsError, match="no regular file"):
                load_settings(config=named)

    def test_a_file_has_an_end(self, tmp_path: Path) -> None:
        (tmp_path / "k.toml").write_text("#" * ((1 << 20) + 1))
        (problem,) = check_file(tmp_path / "k.toml")
        assert "larger than 1048576 bytes" in problem

    def test_an_empty_file_is_good(self, tmp_path: Path) -> None:
        (tmp_path / "k.toml").touch()
        assert check_file(tmp_path / "k.toml") == []


def test_the_object_is_frozen() -> None:
    settings = load_settings()
    with pytest.raises(ValidationError):
        settings.port = 1


def test_unknown_keywords_are_refused() -> None:
    with pytest.raises(ValidationError):
        Settings(prot=1)  # type: ignore[call-arg] # that is the point


def test_unknown_variables_are_found() -> None:
    environ = {"KVYARD_PORT": "1", "KVYARD_PROT": "1", "KVYARD_CONFIG": "x", "OTHER": "1", "KVYARD_TEST_SCRIPT": "x"}
    assert unknown_variables(environ) == ["KVYARD_PROT"]
    assert check_variables(environ) == [
        "KVYARD_PROT (environment): there is no such setting; did you mean KVYARD_PORT?"
    ]


@pytest.mark.parametrize("name", list(Settings.model_fields))
def test_every_field_has_a_sentence_and_a_label(name: str) -> None:
    info = Settings.model_fields[name]
    assert change_of(info) in ("live", "restart")
    assert info.description and info.description.endswith((".", "it."))
    assert info.description[0].isupper()


def test_a_reload_tells_live_changes_from_those_that_wait() -> None:
    old = load_settings()
    new = load_settings({"log_level": "debug", "max_waiting": "5", "port": "1", "model": "x"})
    difference = compare(old, new)
    assert set(difference.live) == {"log_level", "max_waiting"}
    assert set(difference.restart) == {"port", "model"}
    assert compare(old, load_settings()) == type(difference)([], [])


def test_describe_is_plain_json() -> None:
    import json

    rows = load_settings({"socket": "/x/y", "kv_blocks": "5"}).describe()
    assert json.loads(json.dumps(rows)) == rows
    by_name = {row["name"]: row for row in rows}
    assert by_name["socket"]["value"] == "/x/y" and by_name["kv_blocks"]["value"] == 5
    assert by_name["kv_blocks"]["default"] is None


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("", ""),
        ("*", "*"),
        ("https://a.example, http://localhost:3000", "https://a.example,http://localhost:3000"),
        ("http://[::1]:8080", "http://[::1]:8080"),
    ],
)
def test_origins_are_taken_as_browsers_send_them(given: str, kept: str) -> None:
    assert load_settings({"cors_origins": given}).cors_origins == kept


def test_origins_may_be_a_list_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "k.toml"
    path.write_text('cors_origins = ["https://a.example", "https://b.example"]\n')
    assert load_settings(config=path).cors_origins == "https://a.example,https://b.example"


@pytest.mark.parametrize(
    "wrong", ["a.example", "https://a.example/", "https://A.example", "https://a.example/path", "null"]
)
def test_what_is_no_origin_is_refused(wrong: str) -> None:
    with pytest.raises(SettingsError, match="is no origin"):
        load_settings({"cors_origins": wrong})
