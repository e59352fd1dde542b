"""Arrivals: when requests come and how long they are, from the CSV and JSONL forms of public traces.

CSV: columns `arrival_s`, `prompt_tokens`, `output_tokens`, and optionally `max_tokens`, `tenant`, `priority`,
`deadline_s` (after arrival). JSONL (Mooncake): `timestamp` in milliseconds, `input_length`, `output_length`, and
optionally `max_tokens` and `hash_ids`, one per 512 prompt tokens; equal ids are equal tokens, so a common start is a
common prefix. docs/disciplines.md has a table.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvyard.core.plan import TokenArray

COLUMNS = (
    "arrival_s", "prompt_tokens", "output_tokens", "max_tokens", "tenant", "priority", "deadline_s"
)  # fmt: skip
FIELDS = ("timestamp", "input_length", "output_length", "max_tokens", "hash_ids")
EXAMPLE = '{"timestamp": 0, "input_length": 100, "output_length": 20}'
MOST = 10**9
"""Largest whole number of a file."""
HASHED_TOKENS = 512
"""Prompt tokens that one id of `hash_ids` stands for."""


class ArrivalError(ValueError):
    """An arrivals file cannot be read; the text says which line and what it lacks."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to come. Times in seconds from the start, lengths in tokens."""

    at: float
    prompt: int
    output: int
    """Tokens after which it stops."""
    max_tokens: int
    """What its client asks for at most: all that policies see of its length."""
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None
    """From the start, not from its arrival."""
    hash_ids: tuple[int, ...] = ()

    def tokens(self) -> TokenArray | None:
        """The prompt's tokens where its contents are known by their hashes."""
        if not self.hash_ids:
            return None
        starts = np.array(self.hash_ids, np.int64) * HASHED_TOKENS
        tokens = (starts[:, None] + np.arange(HASHED_TOKENS)).reshape(-1)[: self.prompt]
        return (tokens % np.iinfo(np.int32).max).astype(np.int32)


def read_arrivals(
    path: Path,
    *,
    until: float | None = None,
    rate: float = 1.0,
    max_tokens: int | None = None,
    ignored: set[str] | None = None,
) -> list[Arrival]:
    """The arrivals of a file, in order of time. Raises ArrivalError.

    until       seconds of the trace's own time to take.
    rate        arrivals come so many times as densely.
    max_tokens  what clients ask for at most, where the file does not say; None is exactly what they get.
    ignored     gets the names of columns or fields that are there and not read.
    """
    if not 0 < rate < float("inf"):
        raise ArrivalError(f"the rate is a positive factor, not {rate:g}")
    if until is not None and not until > 0:
        raise ArrivalError(f"--until is a positive number of seconds, not {until:g}")
    if max_tokens is not None and max_tokens < 1:
        raise ArrivalError(f"--max-tokens is at least 1, not {max_tokens}")
    arrivals = []
    for arrival in _read(path, set() if ignored is None else ignored):
        if until is not None and arrival.at >= until:
            continue
        limit = arrival.max_tokens or max(arrival.output, max_tokens or 0)
        late = None if arrival.deadline is None else arrival.at / rate + arrival.deadline - arrival.at
        arrivals.append(replace(arrival, at=arrival.at / rate, max_tokens=limit, deadline=late))
    arrivals.sort(key=lambda arrival: arrival.at)
    if not arrivals:
        raise ArrivalError(f"{path} has no arrivals in the time asked for")
    return arrivals


def _read(path: Path, ignored: set[str]) -> Iterator[Arrival]:
    make, known = (_from_mooncake, FIELDS) if path.suffix == ".jsonl" else (_from_row, COLUMNS)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows: Iterable[Mapping[str, Any]] = (
                (json.loads(line) for line in file if line.strip())
                if path.suffix == ".jsonl"
                else csv.DictReader(file)
            )
            for number, row in enumerate(rows, 1):
                if not isinstance(row, dict):
                    raise ArrivalError(f"{path}, request {number}: a line is a JSON object, such as {EXAMPLE}")
                ignored.update(str(name) for name in row if name is not None and name not in known)
                yield _checked(make, row, f"{path}, request {number}")
    except OSError as error:
        raise ArrivalError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArrivalError(f"{path} is neither CSV nor JSON lines: {error}") from error


def _checked(make: Any, row: Mapping[str, Any], where: str) -> Arrival:  # noqa: ANN401 - one of the two below
    try:
        arrival: Arrival = make(row)
    except KeyError as error:
        raise ArrivalError(f"{where}: {error.args[0]} is missing") from None
    except _Misstated as error:
        raise ArrivalError(f"{where}: {error}") from None
    if arrival.prompt < 1 or arrival.output < 1 or not 0 <= arrival.at < float("inf"):
        raise ArrivalError(
            f"{where}: a time of arrival, and at least one prompt token and one output token are needed"
        )
    if arrival.max_tokens and arrival.max_tokens < arrival.output:
        raise ArrivalError(f"{where}: {arrival.output} output tokens are more than max_tokens {arrival.max_tokens}")
    return arrival


class _Misstated(ValueError):
    """A value is not what its column or field holds."""


def _number(row: Mapping[str, Any], name: str) -> float:
    """A finite number. Raises KeyError where there is none."""
    value = row[name]
    if value is None or value == "":
        raise KeyError(name)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise _Misstated(f"{name} is a number, not {str(value)[:40]!r}")
    return number


def _whole(row: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number; `default` where there is none. Raises KeyError where there is none and no default."""
    if default is not None and row.get(name) in (None, ""):
        return default
    number = _number(row, name)
    if number != int(number) or abs(number) > MOST:
        raise _Misstated(f"{name} is a whole number up to {MOST:,}, not {str(row[name])[:40]!r}")
    return int(number)


def _from_row(row: Mapping[str, Any]) -> Arrival:
    at = _number(row, "arrival_s")
    return Arrival(
        at=at,
        prompt=_whole(row, "prompt_tokens"),
        output=_whole(row, "output_tokens"),
        max_tokens=_whole(row, "max_tokens", 0),
        tenant=row.get("tenant") or "",
        priority=_whole(row, "priority", 0),
        deadline=at + _number(row, "deadline_s") if row.get("deadline_s") else None,
    )


def _from_mooncake(row: Mapping[str, Any]) -> Arrival:
    given = row.get("hash_ids", ())
    if not isinstance(given, list | tuple) or not all(type(id) is int for id in given):
        raise _Misstated("hash_ids is a list of whole numbers")
    hash_ids, prompt = tuple(given), _whole(row, "input_length")
    if hash_ids and len(hash_ids) * HASHED_TOKENS < prompt:
        raise _Misstated(f"{len(hash_ids)} hash ids do not cover {prompt} prompt tokens")
    at = _number(row, "timestamp") / 1e3
    return Arrival(at, prompt, _whole(row, "output_length"), _whole(row, "max_tokens", 0), hash_ids=hash_ids)
