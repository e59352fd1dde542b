"""Arrivals are read from the two forms of public traces, and errors say which request is wrong."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from kvyard.sim.arrivals import HASHED_TOKENS, Arrival, ArrivalError, read_arrivals

from tests.sim.loads import AZURE, MOONCAKE


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_azure_trace() -> None:
    arrivals = read_arrivals(AZURE)
    assert len(arrivals) == 10108
    assert arrivals[0] == Arrival(0.0, 374, 44, 44)
    assert arrivals[1].at == pytest.approx(4.315)
    assert all(a.at <= b.at for a, b in pairwise(arrivals))


def test_the_mooncake_trace() -> None:
    arrivals = read_arrivals(MOONCAKE)
    assert len(arrivals) == 1500
    first, second = arrivals[0], arrivals[1]
    assert (first.prompt, first.output) == (6758, 500)
    a, b = first.tokens(), second.tokens()
    assert a is not None and b is not None
    assert len(a) == 6758 and a.dtype == np.int32
    assert (a[:HASHED_TOKENS] == b[:HASHED_TOKENS]).all(), "the first id of both is 0"
    assert not (a[HASHED_TOKENS : 2 * HASHED_TOKENS] == b[HASHED_TOKENS : 2 * HASHED_TOKENS]).any()


def test_a_part_of_the_time_and_another_rate() -> None:
    part = read_arrivals(AZURE, until=600)
    assert len(part) == 2867
    fast = read_arrivals(AZURE, until=600, rate=2.0)
    assert len(fast) == 2867
    assert fast[-1].at == pytest.approx(part[-1].at / 2)


def test_what_clients_ask_for() -> None:
    asked = read_arrivals(AZURE, until=60, max_tokens=300)
    assert all(arrival.max_tokens == max(300, arrival.output) for arrival in asked)
    assert all(arrival.max_tokens == arrival.output for arrival in read_arrivals(AZURE, until=60))


def test_optional_columns(tmp_path: Path) -> None:
    text = (
        "arrival_s,prompt_tokens,output_tokens,max_tokens,tenant,priority,deadline_s\n"
        "2,10,3,50,ada,-1,4.5\n1,20,4,,,,\n"
    )
    first, second = read_arrivals(written(tmp_path / "a.csv", text), rate=2.0)
    assert first == Arrival(0.5, 20, 4, 4)
    assert second == Arrival(1.0, 10, 3, 50, "ada", -1, deadline=5.5), "a deadline is as long after its arrival"


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    text = "arrival_s,prompt_tokens,output_tokens,dead_line,Tenant\n1,2,3,4,5\n"
    ignored: set[str] = set()
    (arrival,) = read_arrivals(written(tmp_path / "a.csv", text), ignored=ignored)
    assert arrival == Arrival(1.0, 2, 3, 3)
    assert ignored == {"dead_line", "Tenant"}
    text = '{"timestamp":0,"input_length":5,"output_length":1,"type":"chat"}\n'
    ignored.clear()
    read_arrivals(written(tmp_path / "a.jsonl", text), ignored=ignored)
    assert ignored == {"type"}
    ignored.clear()
    read_arrivals(AZURE, until=10, ignored=ignored)
    read_arrivals(MOONCAKE, until=10, ignored=ignored)
    assert ignored == set()


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n1,2,3\n", encoding="utf-8-sig")
    assert read_arrivals(path) == [Arrival(1.0, 2, 3, 3)]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "arrival_s,prompt_tokens\n1,2\n", "request 1: output_tokens is missing"),
        (
            "a.csv",
            "arrival_s,prompt_tokens,output_tokens\n1,2,3\n1,x,3\n",
            "request 2: prompt_tokens is a number, not 'x'",
        ),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n1,0,3\n", "at least one prompt token"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n-1,2,3\n", "a time of arrival"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\nnan,2,3\n", "arrival_s is a number, not 'nan'"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n1,2.5,3\n", "prompt_tokens is a whole number up to"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n1,1e30,3\n", "prompt_tokens is a whole number up to"),
        ("a.jsonl", "[1]\n", "request 1: a line is a JSON object, such as"),
        ("a.jsonl", '{"timestamp":0,"input_length":null,"output_length":1}\n', "input_length is missing"),
        ("a.jsonl", '{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":"x"}\n', "hash_ids is a list"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens,max_tokens\n1,2,9,3\n", "more than max_tokens 3"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n", "no arrivals"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n1,2\n", "request 1: output_tokens is missing"),
        ("a.jsonl", '{"timestamp": 1}\n', "input_length is missing"),
        ("a.jsonl", "nonsense\n", "neither CSV nor JSON"),
        ("a.jsonl", '{"timestamp":0,"input_length":600,"output_length":1,"hash_ids":[1]}\n', "do not cover"),
    ],
)
def test_errors_name_the_place(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = written(tmp_path / name, text)
    with pytest.raises(ArrivalError, match=words) as caught:
        read_arrivals(path)
    assert str(path) in str(caught.value)


def test_files_that_are_not_there_and_rates_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ArrivalError, match="cannot be read"):
        read_arrivals(tmp_path / "none.csv")
    with pytest.raises(ArrivalError, match="neither CSV nor JSON"):
        path = tmp_path / "binary.csv"
        path.write_bytes(b"\xff\xfe\x00arrival")
        read_arrivals(path)
    with pytest.raises(ArrivalError, match="positive factor"):
        read_arrivals(AZURE, rate=0)
    for until in (0, -1, float("nan")):
        with pytest.raises(ArrivalError, match="--until is a positive number"):
            read_arrivals(AZURE, until=until)
    with pytest.raises(ArrivalError, match="--max-tokens is at least 1"):
        read_arrivals(AZURE, max_tokens=0)


def test_jsonl_lines_in_any_order_are_sorted(tmp_path: Path) -> None:
    rows = [{"timestamp": at, "input_length": 5, "output_length": 2} for at in (3000, 1000, 2000)]
    path = written(tmp_path / "a.jsonl", "\n".join(json.dumps(row) for row in rows) + "\n\n")
    assert [arrival.at for arrival in read_arrivals(path)] == [1.0, 2.0, 3.0]
    assert read_arrivals(path)[0].tokens() is None
