"""A real server on a real socket, over a scripted service."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from kvyard.front.http.app import create_app
from kvyard.front.http.protocol import KEEP_ALIVE_S, counting
from kvyard.front.http.settings import HttpSettings
from kvyard.front.keys import KeyRing
from kvyard.front.service import Job
from kvyard.front.text.support import TextSupport

from tests.front.http.scripted import Script, ScriptedService

MODEL = "smollm2-135m"

PATIENCE = 4.0
"""Factor on every time limit of the fault cases: they assume an idle machine, and tests run beside each other."""


class Seen:
    """What the API tells its observer."""

    def __init__(self) -> None:
        self.refusals: list[str] = []
        self.cuts: list[str] = []

    def refused(self, code: str) -> None:
        self.refusals.append(code)

    def cut(self, reason: str) -> None:
        self.cuts.append(reason)


class Served:
    """A running server: its service, its clients, its address."""

    def __init__(
        self, service: ScriptedService, text: TextSupport, port: int, server: uvicorn.Server, observer: Seen
    ) -> None:
        self.service = service
        self.observer = observer
        self._server = server
        self.text = text
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.AsyncClient(base_url=self.url, timeout=20, verify=False)

    def stop(self, timeout_s: int) -> None:
        """Stop the server; responses have that long to end."""
        self._server.config.timeout_graceful_shutdown = timeout_s
        self._server.should_exit = True

    def openai(self) -> openai.AsyncOpenAI:
        """OpenAI's own client."""
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=20,
            http_client=openai.DefaultAsyncHttpxClient(verify=False),
        )

    async def complete(self, **fields: object) -> httpx.Response:
        """POST /v1/completions with a prompt, unless another is given."""
        return await self.http.post("/v1/completions", json={"prompt": "Hello", **fields})

    async def chat(self, **fields: object) -> httpx.Response:
        """POST /v1/chat/completions with a message, unless others are given."""
        return await self.http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], **fields}
        )

    async def eventually(self, condition: Callable[[], bool], within_s: float = PATIENCE) -> None:
        """Wait for a condition on the service; fail when it does not come true in time, one second scaled."""
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 - the condition is any state of the service
                await asyncio.sleep(0.005)


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture(scope="session")
def support(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> TextSupport:
    """The default model's text side."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVYARD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return TextSupport.load(default_model)


@pytest.fixture()
def serve(support: TextSupport) -> Serve:
    """`async with serve(script, ...) as served`: serve a text, tokens, or a function from a job to its script."""

    @contextlib.asynccontextmanager
    async def serving(
        script: str | Script | Callable[[Job, int], Script] = "",
        *,
        text: TextSupport = support,
        settings: HttpSettings | None = None,
        write_buffer: int | None = None,
        keys: KeyRing | None = None,
        **service_fields: Any,  # noqa: ANN401 - fields of ScriptedService
    ) -> AsyncIterator[Served]:
        service = ScriptedService(_script(script, text), **service_fields)
        observer = Seen()
        app = create_app(
            service,
            text,
            settings=settings or HttpSettings(MODEL, created=1_700_000_000),
            render_metrics=lambda: b"# HELP kvyard_up 1 while the front lives.\nkvyard_up 1\n",
            observer=observer,
            keys=keys,
            version="9.9.9",
        )
        listening = socket.create_server(("127.0.0.1", 0))
        if write_buffer is not None:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, write_buffer)
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=counting(observer.refused),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=2,
            )
        )
        task = asyncio.create_task(server._serve([listening]))
        served = Served(service, text, listening.getsockname()[1], server, observer)
        try:
            yield served
        finally:
            await served.http.aclose()
            server.should_exit = True
            await task

    return serving


def _script(given: str | Script | Callable[[Job, int], Script], text: TextSupport) -> Callable[[Job, int], Script]:
    if callable(given):
        return given
    items: Script = text.tokenizer.encode(given) if isinstance(given, str) else given
    return lambda job, index: items


def events(body: str) -> list[str]:
    """The data of each event of a stream."""
    parts = [part for part in body.split("\n\n") if part]
    assert all(part.startswith("data: ") for part in parts)
    return [part.removeprefix("data: ") for part in parts]
