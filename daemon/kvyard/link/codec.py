"""Encoding of the link's messages: msgpack, one union per direction."""

from __future__ import annotations

import msgspec

from kvyard.link.messages import (
    Cancel,
    Control,
    Ejected,
    EngineInfo,
    Failed,
    Goodbye,
    Loading,
    Outputs,
    PolicyState,
    Refused,
    Reply,
    Start,
    Stop,
    Submit,
)
from kvyard.link.record import StepRecord

ToEngine = Start | Submit | Cancel | Control | Stop
ToFront = Loading | EngineInfo | Refused | Outputs | Failed | Ejected | PolicyState | Reply | StepRecord | Goodbye

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_front = msgspec.msgpack.Decoder(ToFront)


class LinkError(Exception):
    """The other side sent something that is not a message of this link."""


def encode(message: ToEngine | ToFront) -> bytes:
    """A message as msgpack bytes."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes | memoryview) -> ToEngine:
    """A message for the engine. Raises LinkError."""
    try:
        return _to_engine.decode(data)
    except msgspec.MsgspecError as error:
        raise LinkError(f"front sent no message that this engine knows: {error}") from error


def decode_to_front(data: bytes | memoryview) -> ToFront:
    """A message for the front. Raises LinkError."""
    try:
        return _to_front.decode(data)
    except msgspec.MsgspecError as error:
        raise LinkError(f"engine sent no message that this front knows: {error}") from error
