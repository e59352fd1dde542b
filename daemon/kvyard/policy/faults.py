"""Why a policy is put out: every code of an exit record, with its meaning. One list for guard, metrics and docs."""

from __future__ import annotations

from collections.abc import Mapping

CODES: Mapping[str, str] = {
    "raised": "it raised an exception",
    "not-a-decision": "it returned something that is no decision",
    "nonsense": "a decision with impossible values: a negative count, a list where a tuple belongs, not a number",
    "over-budget": "a prompt is granted more than four times what a step has and the prompt wants",
    "over-committed": "an admission promises a request room for more than four times what the whole pool holds",
    "duplicate": "a decision names a request twice",
    "unknown": "a decision names something that is no request of the snapshot",
    "finished": "a decision names a request that has ended",
    "not-waiting": "an admission names a request that does not wait",
    "not-running": "a victim does not run",
    "timeout": "one call took more than 50 ms of CPU time or 500 ms in all",
    "too-slow": "20 of 100 calls took more than 2 ms of CPU time",
    "overridden": "the core had to override half of its last hundred decisions",
    "stalled": "work waits and nothing is scheduled for a second, or, with wake-ups declared, for two minutes",
    "starving": "a request is passed over by more than a thousand others that are no more urgent, or too long",
    "thrashing": "a request gave way to later ones over 32 times in a row, each before it won a quarter of its loss",
    "memory": "it took more memory than a policy may take, at once, in pieces or mapped",
    "spawned": "it tried to start a thread or a process",
    "forbidden": "it tried to open a file or a socket",
    "tampered": "it changed the guard's timer, a module of kvyard or a setting of the process, or tried to",
    "hung": "the engine was stuck in its code and had to be ended",
    "crashed": "the engine ended while its code ran",
}
