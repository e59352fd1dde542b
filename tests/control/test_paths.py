"""Where the socket and the configuration are looked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvyard.control import paths


def test_the_runtime_folder_of_the_user_comes_first() -> None:
    found = paths.default_socket({"XDG_RUNTIME_DIR": "/run/user/7"}, uid=7)
    assert found == Path("/run/user/7/kvyard/kvyard.sock")


def test_root_without_a_runtime_folder_takes_the_systems_place() -> None:
    assert paths.default_socket({}, uid=0) == Path("/run/kvyard/kvyard.sock")


def test_other_users_get_a_folder_of_their_own() -> None:
    assert paths.default_socket({}, uid=1234) == Path("/tmp/kvyard-1234/kvyard.sock")


def test_an_explicit_configuration_stands_alone_even_if_it_is_missing(tmp_path: Path) -> None:
    assert paths.config_files(tmp_path / "none.toml", {"KVYARD_CONFIG": "/other"}) == [tmp_path / "none.toml"]
    assert paths.config_files(None, {"KVYARD_CONFIG": "/other"}) == [Path("/other")]


def test_configurations_rise_from_system_to_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = tmp_path / "etc.toml"
    user = tmp_path / "config" / "kvyard" / "kvyard.toml"
    monkeypatch.setattr(paths, "SYSTEM_CONFIG", system)
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    assert paths.config_files(None, environ) == []
    user.parent.mkdir(parents=True)
    user.touch()
    system.touch()
    assert paths.config_files(None, environ) == [system, user]


def test_home_stands_in_for_the_configuration_folder(tmp_path: Path) -> None:
    user = tmp_path / ".config" / "kvyard" / "kvyard.toml"
    user.parent.mkdir(parents=True)
    user.touch()
    assert paths.config_files(None, {"HOME": str(tmp_path)})[-1] == user


class TestClientSocket:
    @pytest.fixture(autouse=True)
    def no_system_daemon(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A daemon of this machine, be it one that was killed, may have its socket in the system's place."""
        monkeypatch.setattr(paths, "SYSTEM_SOCKET", tmp_path / "none.sock")
        monkeypatch.setattr(paths, "SYSTEM_CONFIG", tmp_path / "none.toml")

    def test_the_flag_wins(self) -> None:
        assert paths.client_socket(Path("/a"), {"KVYARD_SOCKET": "/b"}) == Path("/a")

    def test_then_the_variable(self, tmp_path: Path) -> None:
        environ = {"KVYARD_SOCKET": "/b", "KVYARD_CONFIG": str(_config(tmp_path, "/c"))}
        assert paths.client_socket(None, environ) == Path("/b")

    def test_then_the_configuration(self, tmp_path: Path) -> None:
        environ = {"KVYARD_CONFIG": str(_config(tmp_path, "/c")), "XDG_RUNTIME_DIR": "/d"}
        assert paths.client_socket(None, environ) == Path("/c")

    def test_then_the_users_own(self, tmp_path: Path) -> None:
        assert paths.client_socket(None, {"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "kvyard" / "kvyard.sock"

    def test_the_systems_if_the_user_has_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        system = tmp_path / "system.sock"
        system.touch()
        monkeypatch.setattr(paths, "SYSTEM_SOCKET", system)
        assert paths.client_socket(None, {"XDG_RUNTIME_DIR": str(tmp_path / "nothing")}) == system

    @pytest.mark.parametrize("text", ["socket = 3", "socket = ", "\x00", "other = 1"])
    def test_a_configuration_that_says_nothing_useful_is_passed_over(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "kvyard.toml"
        file.write_text(text)
        environ = {"KVYARD_CONFIG": str(file), "XDG_RUNTIME_DIR": str(tmp_path)}
        assert paths.client_socket(None, environ) == tmp_path / "kvyard" / "kvyard.sock"

    def test_a_pipe_is_passed_over_at_once(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "kvyard.toml")
        environ = {"KVYARD_CONFIG": str(tmp_path / "kvyard.toml"), "XDG_RUNTIME_DIR": str(tmp_path)}
        assert paths.client_socket(None, environ) == tmp_path / "kvyard" / "kvyard.sock"


def _config(folder: Path, socket: str) -> Path:
    file = folder / "kvyard.toml"
    file.write_text(f'socket = "{socket}"\n')
    return file
