"""Who may use the API: with keys in force every request but the probes' needs `Authorization: Bearer KEY`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from kvyard.front.http.errors import ApiError, error_response
from kvyard.front.keys import KeyRing

OPEN: Final = frozenset({"/health", "/ready"})
"""Paths for probes, which hold no key; they say nothing of any request."""
_TENANT: Final = "kvyard.tenant"
_CHALLENGE: Final = 'Bearer realm="kvyard"'


def tenant_of(scope: Scope) -> str | None:
    """The tenant of the key that a request came with; None where no keys are in force."""
    tenant: str | None = scope.get(_TENANT)
    return tenant


class Authentication:
    """ASGI middleware in front of every route."""

    def __init__(self, app: ASGIApp, keys: KeyRing, refused: Callable[[str], None]) -> None:
        """`refused` is told the code of every refusal."""
        self._app = app
        self._keys = keys
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys.required and scope["path"] not in OPEN:
            try:
                scope[_TENANT] = self._tenant(scope)
            except ApiError as error:
                self._refused("invalid_api_key")
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, secret = given[0].decode("latin-1").partition(" ") if len(given) == 1 else ("", "", "")
        if scheme.lower() != "bearer" or not secret.strip():
            raise _unauthorized("This server needs an API key: send the header `Authorization: Bearer KEY`.", "")
        key = self._keys.find(secret.strip())
        if key is None:
            raise _unauthorized("The API key is not one of this server's.", ', error="invalid_token"')
        return key.tenant


def _unauthorized(message: str, why: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": _CHALLENGE + why})
