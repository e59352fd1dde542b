"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.responses import Response

from kvyard.front.service import Refusal

JSON: Final = "application/json"


class ErrorDetail(msgspec.Struct):
    """What went wrong, for people (`message`) and for programs (`code`)."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    """Body of every answer with a status of 400 and above."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that is answered with an error; `param` is the field at fault, in dotted form."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers or {}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A 400: the request itself must be changed."""
    return ApiError(400, message, code=code, param=param)


def from_refusal(refusal: Refusal) -> ApiError:
    """The serving side's refusal, with Retry-After where trying again can help."""
    headers = {} if refusal.retry_after is None else {"retry-after": str(refusal.retry_after)}
    return ApiError(refusal.status, refusal.message, code=refusal.code, headers=headers)


_GENERATION_ERRORS: Final[dict[str, tuple[int, dict[str, str]]]] = {
    "queue_timeout": (408, {"retry-after": "1"}),
    "deadline": (408, {"x-should-retry": "false"}),
    "cancelled": (503, {"x-should-retry": "false"}),
    "engine_killed": (500, {"x-should-retry": "false"}),
    "never_fits": (400, {}),
    "bad_sequence": (400, {}),
    "bad_request": (400, {}),
    "refused_by_policy": (503, {"x-should-retry": "false"}),
    "shutting_down": (503, {"retry-after": "1"}),
}
"""Status and headers by code. `x-should-retry` keeps OpenAI's clients from repeating what would end the same way."""


def from_generation(code: str, message: str) -> ApiError:
    """The error that ended an accepted request."""
    status, headers = _GENERATION_ERRORS.get(code, (500, {}))
    return ApiError(status, message, code=code, headers=headers)


def error_body(error: ApiError) -> bytes:
    """The JSON of an error."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return msgspec.json.encode(ErrorResponse(ErrorDetail(error.message, kind, error.param, error.code)))


_TYPES: Final = {403: "permission_error", 429: "rate_limit_error"}
"""By status; OpenAI calls a wrong key an invalid request, too."""


def error_response(error: ApiError) -> Response:
    """The whole response of an error."""
    return Response(error_body(error), error.status, error.headers, JSON)
