"""`kvyard serve`: from settings to a serving daemon and back.

The order matters: what can be refused at once (address, socket, model) is tried before anything slow; the
engine loads while the tokenizer does; clients are answered (503) from the first moment on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import uvloop

from kvyard import __version__
from kvyard.front.control.listener import SocketError
from kvyard.front.control.server import ControlServer
from kvyard.front.daemon import Daemon, EngineRefused, Served
from kvyard.front.http.app import create_app
from kvyard.front.http.settings import HttpSettings
from kvyard.front.http_server import HttpServer, ListenError, address_of, bind
from kvyard.front.keys import KeyFileError, KeyRing
from kvyard.front.models import ModelError, ModelNotFound, ModelRef, resolve_or_pull
from kvyard.front.models.inspect import inspect
from kvyard.front.notify import Notifier
from kvyard.front.settings import Settings
from kvyard.front.text.errors import ModelTextError
from kvyard.front.text.support import TextSupport
from kvyard.link.messages import EngineInfo
from kvyard.logs import configure

log = structlog.get_logger(__name__)

OK, NOT_INSTALLED, UNUSABLE = 0, 5, 6
"""Exit status: ended as asked, the model is not there (LSB 5), not usable as configured (LSB 6)."""
GOODBYE_S = 2.0
"""Seconds for the last responses to reach their clients after everything has ended."""


def serve(settings: Settings, reread: Callable[[], Settings]) -> int:
    """Run the daemon in the foreground; the exit status. `reread` makes the settings anew on SIGHUP."""
    configure(settings.log_level, settings.log_format)
    try:
        keys = KeyRing(settings.api_key_file)
        model = resolve_or_pull(settings.model, settings.model_dir)
        listening = bind(settings.host, settings.port)
        control = ControlServer(settings.socket, __version__, settings.operator_group)
    except ModelNotFound as error:
        _refuse(str(error), error.hint)
        return NOT_INSTALLED
    except (KeyFileError, ModelError, ListenError, SocketError) as error:
        return _refuse(str(error), getattr(error, "hint", ""))
    print(f"kvyard loads {model.id} ({model.path})", flush=True)  # noqa: T201 - seconds pass before it is ready
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(_run(settings, reread, keys, model, listening, control))
    if status == OK:
        print("kvyard has stopped", flush=True)  # noqa: T201 - a drain is over when this is read
    return status


def _refuse(message: str, hint: str = "") -> int:
    print(f"kvyard: {message}", file=sys.stderr)  # noqa: T201 - the last word of a command
    if hint:
        print(f"        {hint}", file=sys.stderr)  # noqa: T201 - as above
    return UNUSABLE


def _family(model: ModelRef) -> str:
    try:
        return inspect(model).family
    except ModelError:
        return model.format


@dataclass(slots=True)
class _Stop:
    """What was asked of the daemon: once to drain, twice to leave at once."""

    drain: asyncio.Event
    force: asyncio.Event

    def ask(self) -> None:
        """A signal or an operator's word."""
        (self.force if self.drain.is_set() else self.drain).set()


async def _run(
    settings: Settings,
    reread: Callable[[], Settings],
    keys: KeyRing,
    model: ModelRef,
    listening: socket.socket,
    control: ControlServer,
) -> int:
    stop = _Stop(asyncio.Event(), asyncio.Event())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.ask)
    address = address_of(listening)
    served = Served(settings.served_model_name or model.id, str(model.path), await asyncio.to_thread(_family, model))
    daemon = Daemon(settings, served, address, keys)
    daemon.stop_asked = stop.drain.set
    loop.add_signal_handler(signal.SIGHUP, daemon.reload, reread)
    daemon.start()
    try:
        text = await asyncio.to_thread(TextSupport.load, Path(model.path))
    except ModelTextError as error:
        await daemon.supervisor.stop()
        await control.close()
        return _refuse(str(error))
    daemon.text = text
    app = create_app(
        daemon.serving,
        text,
        settings=_http_settings(settings, served.id),
        render_metrics=daemon.metrics.render,
        observer=daemon.metrics,
        keys=keys,
    )
    http = HttpServer(app, listening, refused=daemon.metrics.refused)
    await control.start(daemon)
    notifier = Notifier()
    tasks = [
        asyncio.create_task(http.serve()),
        asyncio.create_task(daemon.sweep()),
        asyncio.create_task(notifier.watch(daemon.supervisor.in_time, daemon.status_line)),
    ]
    try:
        return await _live(daemon, http, stop, address, notifier)
    finally:
        await control.close()
        await daemon.supervisor.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        text.close()


def _http_settings(settings: Settings, model_id: str) -> HttpSettings:
    return HttpSettings(
        model_id=model_id,
        created=int(time.time()),
        cors_origins=tuple(filter(None, settings.cors_origins.split(","))),
        most_unsent=settings.client_buffer_kib << 10,
    )


async def _live(daemon: Daemon, http: HttpServer, stop: _Stop, address: str, notifier: Notifier) -> int:
    stopping = asyncio.create_task(stop.drain.wait())
    first: set[asyncio.Future[Any]] = {daemon.first_ready, stopping}
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if daemon.first_ready.done():
        try:
            info = daemon.first_ready.result()
            _tell_window(daemon.settings.max_model_len, info)
            _announce(daemon, info, address)
            notifier.send(READY=1)
        except EngineRefused as error:
            http.stop(force=True)
            stopping.cancel()
            status = _refuse(error.refused.message, error.refused.hint)
            # As the commands have it: what is named and not there is another thing than what cannot be used.
            return NOT_INSTALLED if error.refused.code == "unknown" else status
        await stopping
    notifier.send(STOPPING=1)
    await _drain(daemon, http, stop)
    return OK


async def _drain(daemon: Daemon, http: HttpServer, stop: _Stop) -> None:
    limit_s = daemon.settings.drain_timeout_s
    draining = asyncio.create_task(daemon.drained(limit_s))
    forced = asyncio.create_task(stop.force.wait())
    first: set[asyncio.Future[Any]] = {draining, forced}
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if forced.done():
        daemon.forced()
    for task in (draining, forced):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    # The last tokens and errors are still on their way to the clients.
    http.stop()
    goodbyes = [asyncio.create_task(http.stopped.wait()), asyncio.create_task(stop.force.wait())]
    await asyncio.wait(goodbyes, timeout=GOODBYE_S, return_when=asyncio.FIRST_COMPLETED)
    for task in goodbyes:
        task.cancel()


def _tell_window(asked: int | None, info: EngineInfo) -> None:
    """Say where the window is what the pool holds, which is less than the model's own limit."""
    held = info.kv_blocks * info.block_size + 1
    if asked is None and info.max_model_len == held:
        log.info(
            "max_model_len.lowered",
            max_model_len=held,
            kv_blocks=info.kv_blocks,
            block_size=info.block_size,
            reason="the KV pool holds no longer sequence, though the model would take one; kv_blocks sets its size",
        )


def _announce(daemon: Daemon, info: EngineInfo, address: str) -> None:
    log.info(
        "daemon.ready",
        address=address,
        model=daemon.model.id,
        device=info.device,
        dtype=info.dtype,
        kv_blocks=info.kv_blocks,
        max_model_len=info.max_model_len,
        pid=os.getpid(),
    )
    key = " -H 'Authorization: Bearer YOUR_KEY'" if daemon.settings.api_key_file is not None else ""
    body = f'{{"model": "{daemon.model.id}", "prompt": "The capital of France is", "max_tokens": 8}}'
    lines = [
        f"kvyard is ready: {address}  (model {daemon.model.id}, {info.dtype} on {info.device})",
        f"  try:     curl {address}/v1/completions -H 'Content-Type: application/json'{key} -d '{body}'",
        f"  watch:   kvyard top --socket {daemon.settings.socket}",
        "  stop:    Ctrl-C (drains; twice to force)",
    ]
    print("\n".join(lines), flush=True)  # noqa: T201 - the ready line is what a person waits for
