"""Quarantine: longer each time, over restarts, released on a word, never in the daemon's way."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvyard.front.quarantine import BASE_S, LONGEST_S, Quarantine, state_file


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_each_time_twice_as_long(tmp_path: Path) -> None:
    clock = Clock()
    quarantine = Quarantine(tmp_path / "q.json", clock)
    expected = BASE_S
    for times in range(1, 14):
        entry = quarantine.add("admission/bad", "raised", "ValueError")
        assert entry.times == times
        assert entry.until == clock.now + min(expected, LONGEST_S)
        expected *= 2
        clock.now += 1


def test_comes_back_in_time_and_survives_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    Quarantine(tmp_path / "deep" / "q.json", clock).add("prefill/slow", "too-slow", "21 overruns")
    again = Quarantine(tmp_path / "deep" / "q.json", clock)
    found = again.blocked("prefill/slow")
    assert found is not None
    assert (found.code, found.message) == ("too-slow", "21 overruns")
    assert [entry.policy for entry in again.active()] == ["prefill/slow"]
    clock.now += BASE_S
    assert again.blocked("prefill/slow") is None
    assert again.active() == []
    assert again.add("prefill/slow", "too-slow", "again").times == 2


def test_release_wipes_the_record(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "q.json")
    quarantine.add("admission/bad", "raised", "")
    assert quarantine.release("admission/bad")
    assert not quarantine.release("admission/bad")
    assert Quarantine(tmp_path / "q.json").active() == []
    assert quarantine.add("admission/bad", "raised", "").times == 1


def test_another_version_is_free(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "q.json")
    quarantine.add("admission/bad", "raised", "", "1.0.0")
    assert quarantine.blocked("admission/bad", "1.0.0") is not None
    assert quarantine.blocked("admission/bad", "1.1.0") is None
    assert quarantine.blocked("admission/bad") is not None, "who knows which it is"
    assert quarantine.add("admission/bad", "raised", "", "1.1.0").times == 1
    assert quarantine.add("admission/bad", "raised", "", "1.0.0").times == 2
    again = Quarantine(tmp_path / "q.json")
    assert [(entry.version, entry.times) for entry in again.active()] == [("1.0.0", 2), ("1.1.0", 1)]
    assert again.release("admission/bad")
    assert again.active() == []


def test_a_file_without_versions_holds_for_all(tmp_path: Path) -> None:
    path = tmp_path / "q.json"
    path.write_text('[{"policy": "admission/bad", "code": "raised", "message": "", "until": null, "times": 2}]')
    quarantine = Quarantine(path)
    assert quarantine.problem == ""
    assert quarantine.blocked("admission/bad", "7.0") is not None


@pytest.mark.parametrize("content", [b"", b"{}", b"[{]", b"\xff\xfe"])
def test_a_broken_file_stops_nobody(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "q.json"
    path.write_bytes(content)
    quarantine = Quarantine(path)
    assert "starting with an empty quarantine" in quarantine.problem
    quarantine.add("admission/bad", "raised", "")
    assert len(Quarantine(path).active()) == 1


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    quarantine = Quarantine(file / "q.json")
    quarantine.add("admission/bad", "raised", "")
    assert "will not survive a restart" in quarantine.problem
    assert quarantine.blocked("admission/bad") is not None


def test_without_a_place_it_lives_in_memory() -> None:
    quarantine = Quarantine(None)
    quarantine.add("admission/bad", "raised", "")
    assert quarantine.blocked("admission/bad") is not None
    assert quarantine.problem == ""


def test_place_follows_systemd_then_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    monkeypatch.setenv("STATE_DIRECTORY", "/s:/t")
    assert state_file() == Path("/s/quarantine.json")
    monkeypatch.delenv("STATE_DIRECTORY")
    assert state_file() == Path("/x/kvyard/quarantine.json")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_file().parts[-4:] == (".local", "state", "kvyard", "quarantine.json")
