"""An engine without a model, for the supervisor's tests: `python -m tests.front.tiny_engine LINK_FD PARENT_PID`.

It speaks the real link and writes the real progress page. What it does is in `Start.model_path` (`serve`,
`refuse`, `die-at-start`, `deaf`); a `Control` makes it `hang`, `hang-in-policy`, `hang-in-candidate`, `exit` or
`answer`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time

import numpy as np
from kvyard.engine.channel import Channel, FrontGone
from kvyard.link.messages import Control, EngineInfo, Goodbye, Refused, Reply, Start, Stop
from kvyard.link.progress import EnginePhase, ProgressPage


def info() -> EngineInfo:
    """What it says of itself."""
    return EngineInfo(
        pid=os.getpid(),
        backend="cpu",
        device="nothing",
        dtype="float32",
        deterministic=False,
        kv_blocks=8,
        block_size=16,
        kv_bytes=8,
        max_running=2,
        max_step_tokens=8,
        max_model_len=64,
        vocab_size=10,
        eos_ids=[2],
        policies={},
        generation=0,
    )


def act(message: Control, channel: Channel, page: ProgressPage) -> None:
    """Do what the test asks."""
    page.ids(np.array([5, 6], np.int64))
    match message.method:
        case "hang":
            page.phase(EnginePhase.MODEL, time.monotonic_ns())
            time.sleep(1e6)
        case "hang-in-policy":
            page.policy("admission/stuck", time.monotonic_ns())
            time.sleep(1e6)
        case "hang-in-candidate":
            with page.candidate("admission/endless"):
                time.sleep(1e6)
        case "exit":
            page.phase(EnginePhase.MODEL, time.monotonic_ns())
            channel.send(Goodbye("last words"))
            os._exit(3)
        case _:
            channel.send(Reply(message.ticket, {"pid": os.getpid(), "environment": sorted(os.environ)}))


def serve(start: Start, channel: Channel, page: ProgressPage) -> None:
    """Answer until told to stop."""
    channel.send(info())
    page.phase(EnginePhase.IDLE, time.monotonic_ns())
    while True:
        channel.wait(None)
        for message in channel.receive():
            if isinstance(message, Control):
                act(message, channel, page)
            if isinstance(message, Stop) and start.model_path != "deaf":
                return


def main() -> None:
    """Entry of the process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    start, descriptors = channel.receive_start()
    page = ProgressPage(descriptors[0])
    page.begin(os.getpid(), time.monotonic_ns())
    faulthandler.register(signal.SIGUSR1, file=descriptors[1])
    if start.model_path == "die-at-start":
        os._exit(4)
    if start.model_path == "refuse":
        channel.send(Refused("model", "no such model", "choose another"))
        os._exit(6)
    try:
        serve(start, channel, page)
    except FrontGone:
        os._exit(0)


if __name__ == "__main__":
    main()
