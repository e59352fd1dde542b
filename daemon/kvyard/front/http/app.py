"""The HTTP application: routes, and the small endpoints beside the two that generate."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

import kvyard
from kvyard.front.http import chat, completions
from kvyard.front.http.answers import Detokenized, Health, Model, ModelList, Readiness, Tokenized, Version
from kvyard.front.http.authentication import Authentication
from kvyard.front.http.body import BodyDecoder, read_body
from kvyard.front.http.connection import StallGuard, Watching
from kvyard.front.http.context import Context
from kvyard.front.http.conversation import prompt_text
from kvyard.front.http.cors import Cors
from kvyard.front.http.endpoint import GenerationEndpoint
from kvyard.front.http.errors import JSON, ApiError, error_response, invalid
from kvyard.front.http.openapi import openapi_document
from kvyard.front.http.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from kvyard.front.http.settings import HttpSettings
from kvyard.front.keys import KeyRing
from kvyard.front.service import Refusal, Service
from kvyard.front.text.support import PromptTooLong, TextSupport

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_MOST_TOKENIZED: Final = 1 << 15
"""Tokens that /tokenize counts at most, where the model's window is smaller."""


class Observer(Protocol):
    """Who counts what happens here outside the serving side."""

    def refused(self, code: str) -> None:
        """A request was not accepted."""
        ...

    def cut(self, reason: str) -> None:
        """A client was cut off."""
        ...


class _Nobody:
    def refused(self, code: str) -> None:
        pass

    def cut(self, reason: str) -> None:
        pass


_NOBODY: Final = _Nobody()

ABSENT: Final[dict[str, str]] = {
    "/v1/responses": "the responses API is",
    "/v1/embeddings": "embeddings are",
    "/v1/moderations": "moderation is",
    "/v1/audio/speech": "audio is",
    "/v1/audio/transcriptions": "audio is",
    "/v1/images/generations": "images are",
}
"""Endpoints of the OpenAI API that clients may look for."""


def create_app(
    service: Service,
    text: TextSupport,
    *,
    settings: HttpSettings,
    render_metrics: Callable[[], bytes],
    observer: Observer = _NOBODY,
    keys: KeyRing | None = None,
    version: str = kvyard.__version__,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    entropy: random.Random | None = None,
) -> Starlette:
    """The application. `clock` is CLOCK_MONOTONIC, as in `Job.deadline`; `entropy` gives ids and seeds.

    `keys` may change while it runs; without them, or with none in force, everybody may use the API.
    """
    context = Context(service, text, settings.model_id, clock, wall_clock, entropy or random.SystemRandom())
    stalls = StallGuard(settings.stall_timeout_s, observer.cut)
    small = _SmallEndpoints(context, settings, render_metrics, version)
    completion = GenerationEndpoint(
        CompletionRequest,
        "cmpl",
        completions.understand,
        completions.CompletionFormat,
        context,
        settings,
        stalls,
        observer.refused,
    )
    conversation = GenerationEndpoint(
        ChatRequest, "chatcmpl", chat.understand, chat.ChatFormat, context, settings, stalls, observer.refused
    )
    routes = [
        Route("/v1/completions", completion, methods=["POST"]),
        Route("/v1/chat/completions", conversation, methods=["POST"]),
        Route("/v1/models", small.models),
        Route("/v1/models/{model:path}", small.model),
        Route("/tokenize", small.tokenize, methods=["POST"]),
        Route("/detokenize", small.detokenize, methods=["POST"]),
        Route("/health", small.health),
        Route("/ready", small.ready),
        Route("/metrics", small.metrics),
        Route("/version", small.version),
        Route("/openapi.json", small.openapi),
        *(Route(path, small.absent, methods=["POST"]) for path in ABSENT),
    ]
    errors = _Errors(observer)
    handlers: dict[Any, Any] = {
        HTTPException: errors.http,
        ApiError: errors.api,
        ClientDisconnect: _client_gone,
        Exception: _internal_error,
    }
    layers = _layers(settings, stalls, keys or KeyRing(), observer)
    return Starlette(routes=routes, exception_handlers=handlers, middleware=layers)


def _layers(settings: HttpSettings, stalls: StallGuard, keys: KeyRing, observer: Observer) -> list[Middleware]:
    """From the outside in: a browser's preflight carries no key, and must see why one is missing."""
    layers = [Middleware(Watching, stalls)]
    if settings.cors_origins:
        layers.append(Middleware(Cors, settings.cors_origins, observer.refused))
    return [*layers, Middleware(Authentication, keys, observer.refused)]


class _SmallEndpoints:
    """Endpoints that answer at once."""

    def __init__(
        self, context: Context, settings: HttpSettings, render_metrics: Callable[[], bytes], version: str
    ) -> None:
        self._context = context
        self._settings = settings
        self._render_metrics = render_metrics
        self._version = version
        self._openapi: bytes | None = None
        self._tokenize = BodyDecoder(TokenizeRequest)
        self._detokenize = BodyDecoder(DetokenizeRequest)

    async def health(self, _: Request) -> Response:
        """200 as long as the front lives, whatever the engine does."""
        return _json(Health())

    async def ready(self, _: Request) -> Response:
        """200 when a request would be served now, else 503 with the reason."""
        service = self._context.service
        if service.ready:
            return _json(Readiness(True, ""))
        return _json(Readiness(False, service.not_ready_reason), 503, {"retry-after": "1"})

    async def metrics(self, _: Request) -> Response:
        """Metrics in Prometheus' text form."""
        return Response(self._render_metrics(), media_type=METRICS_TYPE)

    async def version(self, _: Request) -> Response:
        """The daemon's version."""
        return _json(Version(self._version))

    async def openapi(self, _: Request) -> Response:
        """This API's description."""
        if self._openapi is None:
            self._openapi = msgspec.json.encode(openapi_document(self._version))
        return Response(self._openapi, media_type=JSON)

    async def models(self, _: Request) -> Response:
        """The one model."""
        return _json(ModelList(data=[self._model()]))

    async def model(self, request: Request) -> Response:
        """The model, if it is this one."""
        self._context.check_model(request.path_params["model"])
        return _json(self._model())

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or a conversation."""
        body = await self._body(request)
        asked = await self._tokenize.decode_aside(body, "tokenize")
        self._context.check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise invalid("prompt: give either a prompt or messages.", "prompt")
        if asked.messages is not None:
            text, special = await prompt_text(asked, asked.messages, self._context), bool(asked.add_special_tokens)
        else:
            text, special = asked.prompt or "", asked.add_special_tokens is not False
        ids = await self._encode(text, special)
        names = [self._context.text.tokenizer.token_text(i) for i in ids] if asked.return_token_strs else None
        return _json(Tokenized(len(ids), self._context.service.max_model_len, ids, names))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body = await self._body(request)
        asked = await self._detokenize.decode_aside(body, "detokenize")
        self._context.check_model(asked.model)
        self._context.check_ids(asked.tokens, "tokens")
        return _json(Detokenized(self._context.text.tokenizer.decode(asked.tokens)))

    async def absent(self, request: Request) -> Response:
        """An honest refusal."""
        raise invalid(f"{ABSENT[request.url.path]} not supported by this server.", code="unsupported_endpoint")

    async def _encode(self, text: str, special: bool) -> list[int]:
        limit = max(_MOST_TOKENIZED, self._context.service.max_model_len)
        try:
            return await self._context.text.encode(text, limit=limit, add_special_tokens=special)
        except PromptTooLong as error:
            raise invalid(
                f"The text has at least {error.least} tokens; up to {limit} are counted.", "prompt"
            ) from error

    async def _body(self, request: Request) -> bytes:
        return await read_body(request.scope, request.receive, self._settings.max_body_bytes)

    def _model(self) -> Model:
        return Model(
            id=self._settings.model_id,
            created=self._settings.created,
            max_model_len=self._context.service.max_model_len,
        )


def _json(value: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, JSON)


class _Errors:
    """Answers of the small endpoints that are errors; those that generate answer for themselves."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    async def api(self, _: Request, error: ApiError) -> Response:
        """What an endpoint did not accept."""
        if not isinstance(error.__cause__, Refusal):  # the serving side counts its own
            self._observer.refused(error.code or "other")
        return error_response(error)

    async def http(self, request: Request, error: HTTPException) -> Response:
        """Unknown paths and wrong methods, in the shape of all errors."""
        what = f"{request.method} {request.url.path[:200]}"
        message = {404: f"There is no {what} here.", 405: f"{what} is not allowed."}.get(
            error.status_code, error.detail
        )
        name = HTTPStatus(error.status_code).name.lower()
        return await self.api(
            request, ApiError(error.status_code, message, code=name, headers=dict(error.headers or {}))
        )


async def _internal_error(_: Request, __: Exception) -> Response:
    return error_response(ApiError(500, "An internal error ended the request.", code="internal_error"))


async def _client_gone(_: Request, __: ClientDisconnect) -> Response:
    return Response(status_code=400)  # nobody reads it
