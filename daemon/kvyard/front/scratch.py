"""Scratch processes: a plugin's code is loaded in one to see what it does, before the engine may get it.

As the engine does, they run without the daemon's secrets, in a session of their own, and end with the front.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

from kvyard.front.engine_child import engine_environment

_running: set[int] = set()


def running() -> frozenset[int]:
    """Scratch processes that run now."""
    return frozenset(_running)


async def output_of(module: str, *arguments: str, limit_s: float) -> tuple[bytes, int]:
    """What `python -m module arguments` prints, and how it ended, as `Popen.returncode`.

    Whatever it has started ends with it, however this call ends. Raises TimeoutError after `limit_s` seconds.
    """
    # In memory: the end of a pipe comes only when all have closed it who hold it, which may be a forked child.
    with os.fdopen(os.memfd_create("kvyard-scratch"), "rb") as output:
        status = await _run(["-m", module, *arguments], output.fileno(), limit_s)
        output.seek(0)
        return output.read(), status


async def _run(arguments: list[str], stdout: int, limit_s: float) -> int:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        stderr=asyncio.subprocess.DEVNULL,
        env=engine_environment(dict(os.environ)),
        start_new_session=True,
    )
    _running.add(process.pid)
    try:
        return await asyncio.wait_for(process.wait(), limit_s)
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing is left of its group
            os.killpg(process.pid, signal.SIGKILL)
        try:
            await process.wait()
        finally:
            _running.discard(process.pid)
