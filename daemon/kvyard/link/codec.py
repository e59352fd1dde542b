"""Encoding of the link's messages: msgpack, one union per direction."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvyard.link.frames import Body
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
    Sampling,
    Start,
    Stop,
    Submit,
)
from kvyard.link.record import StepRecord

ToEngine = Start | Submit | Cancel | Control | Stop
ToFront = Loading | EngineInfo | Refused | Outputs | Failed | Ejected | PolicyState | Reply | StepRecord | Goodbye

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_front = msgspec.msgpack.Decoder(ToFront)
_to_sampling = msgspec.msgpack.Decoder(Sampling)


class LinkError(Exception):
    """The other side sent something that is not a message of this link."""


def encode(message: ToEngine | ToFront) -> bytes:
    """A message as msgpack bytes."""
    return _encoder.encode(message)


def decode_to_engine(data: Body) -> ToEngine:
    """A message for the engine. Raises LinkError."""
    return _decode(_to_engine, data, "front sent no message that this engine knows")


def decode_to_front(data: Body) -> ToFront:
    """A message for the front. Raises LinkError."""
    return _decode(_to_front, data, "engine sent no message that this front knows")


def encode_sampling(sampling: Sampling) -> bytes:
    """How tokens are chosen, as a sequence carries it."""
    return _encoder.encode(sampling)


def decode_sampling(data: bytes) -> Sampling:
    """What `encode_sampling` made. Raises LinkError."""
    return _decode(_to_sampling, data, "front sent no sampling parameters that this engine knows")


def _decode(decoder: msgspec.msgpack.Decoder[T], data: Body, otherwise: str) -> T:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise LinkError(f"{otherwise}: {error}") from error
