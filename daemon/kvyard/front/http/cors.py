"""Pages of other origins: what a browser is told before it lets one call the API."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from kvyard.front.http.errors import JSON, error_body, invalid

METHODS: Final = ("GET", "POST")
READABLE: Final = ("retry-after", "www-authenticate", "x-request-id", "x-should-retry")
"""Headers of answers that a page may see."""
_OWN: Final = {"content-type", "content-length"}


class Cors(CORSMiddleware):
    """Starlette's, with refusals in the shape of all errors."""

    def __init__(self, app: ASGIApp, origins: Collection[str], refused: Callable[[str], None]) -> None:
        """`refused` is told the code of every refusal."""
        self._refused = refused
        super().__init__(
            app, allow_origins=origins, allow_methods=METHODS, allow_headers=["*"], expose_headers=READABLE
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a preflight: 200, or a 400 that says what is not allowed."""
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        what = f"origin {request_headers['origin'][:200]}"
        if self.is_allowed_origin(request_headers["origin"]):
            what = f"{request_headers['access-control-request-method'][:20]} request from another origin"
        error = invalid(f"A page's {what} is not allowed here (setting cors_origins).", code="cors_refused")
        self._refused("cors_refused")
        headers = {name: value for name, value in answer.headers.items() if name not in _OWN}
        return Response(error_body(error), error.status, headers, JSON)
