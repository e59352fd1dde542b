"""Request bodies: read with a limit, decoded into typed structs, told apart from what is not supported."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, Generic, TypeVar

import msgspec
import structlog
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from kvyard.front.http.errors import ApiError, invalid
from kvyard.front.http.unsupported import HARMLESS, UNSUPPORTED
from kvyard.front.http.wording import wrong_body
from kvyard.front.repeated import repeated_name

log = structlog.get_logger()

S = TypeVar("S", bound=msgspec.Struct)

_DRAIN_BYTES: Final = 64 << 20
"""How much of a too large body is read and thrown away so that its sender gets to read the answer."""

MOST_FIELDS: Final = 1000
"""Of a body; far more than there are."""
_LONG: Final = 64 << 10
"""Bytes of a body that take some milliseconds."""
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_RAW: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body. Raises ApiError 413 above `limit` bytes, ClientDisconnect when the client went away."""
    if declared_length(scope) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()
        if not message.get("more_body", False) or size > _DRAIN_BYTES:
            break
    if size > limit:
        raise _too_large(limit)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def declared_length(scope: Scope) -> int:
    """What Content-Length says; 0 without one. The parser has let digits pass alone."""
    return next((int(value) for name, value in scope.get("headers", ()) if name == b"content-length"), 0)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than {limit} bytes, the most that is accepted.",
        code="body_too_large",
        headers={"connection": "close"},
    )


class BodyDecoder(Generic[S]):
    """Decodes one endpoint's bodies into `kind`."""

    def __init__(self, kind: type[S]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._most_items: Mapping[str, int] = getattr(kind, "most_items", {})
        self._known = frozenset(kind.__struct_fields__)

    async def decode_aside(self, body: bytes, request_id: str) -> S:
        """As `decode`, which for a long body runs beside the loop."""
        if len(body) <= _LONG:
            return self.decode(body, request_id)
        return await asyncio.to_thread(self.decode, body, request_id)

    def decode(self, body: bytes, request_id: str) -> S:
        """The typed request. Raises ApiError 400 for anything that is not one."""
        try:
            fields = _RAW.decode(body)
            if len(fields) > MOST_FIELDS:
                raise invalid(f"The request body has {len(fields)} fields; {MOST_FIELDS} is the most.")
            self._refuse_many_items(fields)
            decoded = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise wrong_body(error, body) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise invalid(f"The request body is not valid JSON: {error}.", code="invalid_json") from error
        except RecursionError as error:
            raise invalid("The request body is nested too deeply.", code="invalid_json") from error
        _refuse_duplicates(body)
        self._check_others(fields, request_id)
        return decoded

    def _refuse_many_items(self, fields: Mapping[str, msgspec.Raw]) -> None:
        for name, most in self._most_items.items():
            text = memoryview(fields.get(name, b"")).tobytes()
            if text[:1] != b"[" or max(text.count(b"["), text.count(b'"') // 2) <= most:
                continue
            items = _ITEMS.decode(text)
            if len(items) > most and bytes(items[0])[:1] in (b"[", b'"'):
                raise invalid(f"{name}: {len(items)} of them; {most} is the most in one request.", name)

    def _check_others(self, fields: Mapping[str, msgspec.Raw], request_id: str) -> None:
        unknown: list[str] = []
        for name in fields.keys() - self._known:
            rule = UNSUPPORTED.get(name)
            if rule is not None:
                rule.check(name, bytes(fields[name]))
            elif name not in HARMLESS:
                unknown.append(name[:64])
        if unknown:
            log.info("unknown request fields ignored", request_id=request_id, fields=sorted(unknown)[:32])


def _refuse_duplicates(body: bytes) -> None:
    """A field given twice is refused, at any depth: which one was meant cannot be known."""
    try:
        twice = repeated_name(body)
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, for one
        raise invalid(f"The body cannot be read: {error}", None) from None
    if twice is not None:
        raise invalid(f"{twice[:64]}: given more than once in one object.", twice[:64], "duplicate_field")
