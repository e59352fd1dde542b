"""The protocol's methods: parameters checked against a type, then handed to the daemon's operations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
from msgspec import Struct

from kvyard.control import schema
from kvyard.control.schema import METHODS, Method
from kvyard.front.operations import GenerateCall, OperationError, Operations, Who

Topic = Literal["status", "steps", "events"]
BY_NAME: dict[str, Method] = {method.name: method for method in METHODS}
MUTATIONS = frozenset(method.name for method in METHODS if method.role != "viewer")
"""Methods that change the daemon: each call is logged with who made it, and is finished once begun."""


class Caller(Protocol):
    """The session that a call came over."""

    @property
    def who(self) -> Who: ...

    def lower(self, role: schema.Role) -> None:
        """Lower the role; OperationError when that would raise it."""
        ...

    def subscribe(self, topics: list[Topic], interval: float) -> None:
        """Replace the session's subscriptions."""
        ...

    async def send(self, topic: str, data: dict[str, Any]) -> None:
        """Send an event that must not be dropped; waits for a slow reader."""
        ...


class _Params(Struct, forbid_unknown_fields=True):
    """Parameters of a method; what is not declared is refused, so that typing errors do not pass."""


class NoParams(_Params):
    pass


class LowerParams(_Params):
    role: schema.Role


class RequestsParams(_Params):
    limit: int = 200


class EventsParams(_Params):
    limit: int = 100


class SubscribeParams(_Params):
    topics: list[Topic]
    interval: float = 1.0


class ShowParams(_Params):
    kind: str = ""
    name: str = ""


class SwapParams(_Params):
    kind: str
    name: str
    params: dict[str, Any] = {}


class SetParams(_Params):
    kind: str
    params: dict[str, Any]


class ReleaseParams(_Params):
    policy: str


class RequestParams(_Params):
    request_id: str


class DrainParams(_Params):
    stop: bool = True


@dataclass(frozen=True, slots=True)
class Handler:
    """Parameter type and function of a method."""

    params: type[Struct]
    run: Callable[[Operations, Caller, Any], Awaitable[object]]


async def _lower(operations: Operations, caller: Caller, p: LowerParams) -> object:
    caller.lower(p.role)
    return {"role": caller.who.role}


async def _subscribe(operations: Operations, caller: Caller, p: SubscribeParams) -> object:
    caller.subscribe(p.topics, max(0.1, min(p.interval, 3600.0)))
    return {"topics": p.topics}


async def _schema(operations: Operations, caller: Caller, p: NoParams) -> object:
    return describe_protocol()


async def _events(operations: Operations, caller: Caller, p: EventsParams) -> object:
    return operations.log.last(p.limit)


async def _generate(operations: Operations, caller: Caller, p: GenerateCall) -> object:
    text: list[str] = []
    tokens: list[int] = []
    last: dict[str, Any] = {}
    async for item in operations.generate(p, caller.who):
        last = dict(item)
        text.append(last.pop("text", ""))
        tokens += last.pop("token_ids", ())
        if p.stream:
            await caller.send("generate", dict(item))
    return {"text": "".join(text), "token_ids": tokens, **last}


HANDLERS: dict[str, Handler] = {
    "schema": Handler(NoParams, _schema),
    "lower": Handler(LowerParams, _lower),
    "status": Handler(NoParams, lambda ops, caller, p: ops.status()),
    "requests": Handler(RequestsParams, lambda ops, caller, p: ops.requests(max(0, p.limit))),
    "explain": Handler(RequestParams, lambda ops, caller, p: ops.explain(p.request_id)),
    "events": Handler(EventsParams, _events),
    "subscribe": Handler(SubscribeParams, _subscribe),
    "policy.list": Handler(NoParams, lambda ops, caller, p: ops.policy_list()),
    "policy.show": Handler(ShowParams, lambda ops, caller, p: ops.policy_show(p.kind, p.name)),
    "policy.swap": Handler(SwapParams, lambda ops, caller, p: ops.policy_swap(p.kind, p.name, p.params, caller.who)),
    "policy.set": Handler(SetParams, lambda ops, caller, p: ops.policy_set(p.kind, p.params, caller.who)),
    "policy.release": Handler(ReleaseParams, lambda ops, caller, p: ops.policy_release(p.policy, caller.who)),
    "cancel": Handler(RequestParams, lambda ops, caller, p: ops.cancel(p.request_id, caller.who)),
    "pause": Handler(NoParams, lambda ops, caller, p: ops.pause(caller.who)),
    "resume": Handler(NoParams, lambda ops, caller, p: ops.resume(caller.who)),
    "drain": Handler(DrainParams, lambda ops, caller, p: ops.drain(p.stop, caller.who)),
    "dump": Handler(NoParams, lambda ops, caller, p: ops.dump()),
    "generate": Handler(GenerateCall, _generate),
    "model.list": Handler(NoParams, lambda ops, caller, p: ops.model_list()),
    "config.show": Handler(NoParams, lambda ops, caller, p: ops.config_show()),
}


def parse(method: str, params: dict[str, Any]) -> Struct:
    """Parameters as the method's type. Raises OperationError naming what does not fit."""
    try:
        return msgspec.convert(params, HANDLERS[method].params)
    except msgspec.ValidationError as error:
        known = ", ".join(HANDLERS[method].params.__struct_fields__) or "none"
        raise OperationError("bad-params", f"`{method}`: {error}", f"its parameters are: {known}") from error


def describe_protocol() -> dict[str, Any]:
    """Methods with role, parameters and result, and JSON Schema of every message and result."""
    results = [
        schema.Hello, schema.Request, schema.Response, schema.Event, schema.Status, schema.RequestPage,
        schema.PolicyListing, schema.SwapResult,
    ]  # fmt: skip
    parameters = [handler.params for handler in HANDLERS.values()]
    _, components = msgspec.json.schema_components([*results, *parameters])
    methods = [
        {**msgspec.to_builtins(method), "params_type": HANDLERS[method.name].params.__name__} for method in METHODS
    ]
    return {
        "protocol": schema.PROTOCOL,
        "max_line": schema.MAX_LINE,
        "methods": methods,
        "topics": list(Topic.__args__),  # type: ignore[attr-defined] # of a Literal
        "definitions": components,
    }
