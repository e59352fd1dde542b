"""The API's description as an OpenAPI 3.1 document, made from the very types that decode and encode it."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvyard.front.http import answers, requests
from kvyard.front.http.errors import ErrorResponse

Json = dict[str, Any]

_TYPES: Final = (
    requests.CompletionRequest,
    requests.ChatRequest,
    requests.TokenizeRequest,
    requests.DetokenizeRequest,
    answers.Completion,
    answers.ChatCompletion,
    answers.ChatChunk,
    answers.ModelList,
    answers.Model,
    answers.Tokenized,
    answers.Detokenized,
    answers.Health,
    answers.Readiness,
    answers.Version,
    ErrorResponse,
)
_PREFIX: Final = "#/components/schemas/"


def openapi_document(version: str) -> Json:
    """The whole document."""
    _, components = msgspec.json.schema_components(_TYPES, ref_template=_PREFIX + "{name}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvyard", "version": version, "description": "OpenAI-compatible completions."},
        "paths": _paths(),
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _paths() -> Json:
    completion = _answer("Completion") | _stream("Completion")
    conversation = _answer("ChatCompletion") | _stream("ChatChunk")
    ready = {"200": _response("Ready.", _answer("Readiness")), "503": _response("Not ready.", _answer("Readiness"))}
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/v1/completions": {"post": _generating("Complete a prompt.", "CompletionRequest", completion)},
        "/v1/chat/completions": {"post": _generating("Answer a conversation.", "ChatRequest", conversation)},
        "/v1/models": {"get": _get("The served model in a list.", _answer("ModelList"))},
        "/v1/models/{model}": {
            "get": _get("The served model.", _answer("Model")) | {"parameters": [model]},
        },
        "/tokenize": {
            "post": _posting("Token ids of a prompt or a conversation.", "TokenizeRequest", _answer("Tokenized"))
        },
        "/detokenize": {"post": _posting("Text of token ids.", "DetokenizeRequest", _answer("Detokenized"))},
        "/health": {"get": _get("Whether the front lives.", _answer("Health"))},
        "/ready": {"get": {"summary": "Whether requests are served now.", "responses": ready}},
        "/metrics": {"get": _get("Metrics for Prometheus.", {"text/plain": {"schema": {"type": "string"}}})},
        "/version": {"get": _get("The daemon's version.", _answer("Version"))},
        "/openapi.json": {"get": _get("This document.", {"application/json": {"schema": {"type": "object"}}})},
    }


def _answer(name: str) -> Json:
    return {"application/json": {"schema": {"$ref": _PREFIX + name}}}


def _stream(chunk: str) -> Json:
    # Before OpenAPI 3.2, which has `itemSchema`, tools take the schema of an event stream for that of each event.
    parts = [{"$ref": _PREFIX + name} for name in (chunk, "ErrorResponse")]
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": parts}}
    event = {
        "description": "An event of the stream; the last one's data is [DONE], unless it ends with an error.",
        "type": "object",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
    }
    return {"text/event-stream": {"schema": event}}


def _response(description: str, content: Json) -> Json:
    return {"description": description, "content": content}


def _get(summary: str, content: Json) -> Json:
    return {
        "summary": summary,
        "responses": {
            "200": _response("The answer.", content),
            "default": _response("An error.", _answer("ErrorResponse")),
        },
    }


def _posting(summary: str, request: str, content: Json) -> Json:
    return _get(summary, content) | {"requestBody": {"required": True, "content": _answer(request)}}


def _generating(summary: str, request: str, content: Json) -> Json:
    operation = _posting(summary, request, content)
    for status, why in (
        ("400", "The request must be changed."),
        ("401", "No key, or one that is not in force."),
        ("404", "Another model."),
        ("408", "Its deadline or queue time-out passed, or it was not there whole in time."),
        ("413", "The body is too large."),
        ("429", "The queue is full; Retry-After says when to come back."),
        ("503", "Not ready, or ended by an operator or a policy."),
    ):
        operation["responses"][status] = _response(why, _answer("ErrorResponse"))
    return operation
