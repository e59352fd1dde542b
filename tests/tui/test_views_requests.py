"""The table: which rows, in which order, in which columns, with which text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.control.schema import RequestPage, RequestRow
from kvyard_tui.glyphs import ASCII, UNICODE
from kvyard_tui.model import Preempted, Shown, Step, Yard
from kvyard_tui.spans import plain, width_of
from kvyard_tui.views.requests import (
    COLUMNS,
    SORTS,
    columns_for,
    details,
    digits_of,
    matches,
    progress,
    requests_heading,
    rows,
    table_head,
    table_row,
)

from tests.tui.yard import row, status


def shown(*listed: RequestRow, total: int | None = None, **changes: object) -> Shown:
    yard = Yard()
    yard.saw_requests(RequestPage(total if total is not None else len(listed), list(listed)))
    yard.saw_status(status(), 0.0)
    return Shown(yard, 0.0, **changes)  # type: ignore[arg-type]  # fields of Shown


any_row = st.builds(
    RequestRow,
    id=st.integers(0, 2**60),
    request_id=st.text(max_size=40),
    state=st.sampled_from(["running", "waiting", "preempted", "swapped", "new"]) | st.text(max_size=12),
    reason=st.text(max_size=40),
    age_s=st.floats(-1, 1e9),
    priority=st.integers(-(2**31), 2**31),
    tenant=st.text(max_size=20),
    prompt_tokens=st.integers(0, 10**9),
    computed_tokens=st.integers(0, 10**9),
    output_tokens=st.integers(0, 10**9),
    max_new=st.integers(0, 10**9),
    blocks=st.integers(0, 10**9),
    preemptions=st.integers(0, 10**6),
)


@given(any_row, st.integers(40, 240), st.sampled_from([UNICODE, ASCII]))
def test_every_row_has_the_width_of_the_screen(one: RequestRow, width: int, glyphs: object) -> None:
    columns = columns_for(width)
    assert width_of(table_row(one, columns, shown(one, glyphs=glyphs))) == width
    assert width_of(table_head(columns, shown(one))) == width


@given(st.integers(40, 240))
def test_no_column_is_squeezed_to_nothing(width: int) -> None:
    columns = columns_for(width)
    assert all(size >= 2 for _, size in columns)
    assert [column.key for column, _ in columns if column.key != "number"][:2] == ["request", "state"]


@given(st.lists(any_row, max_size=12), st.sampled_from(SORTS), st.booleans())
def test_every_order_keeps_every_row(listed: list[RequestRow], sort: str, reverse: bool) -> None:
    ordered = rows(shown(*listed, sort=sort, reverse=reverse))
    assert sorted(map(id, ordered)) == sorted(map(id, listed))


def test_wider_screens_show_more() -> None:
    narrow, normal, wide = ({column.key for column, _ in columns_for(width)} for width in (40, 80, 140))
    assert narrow < normal < wide == {column.key for column in COLUMNS}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("", True), ("REQ-0007", True), ("running", True), ("req acme", True), ("req nobody", False),
        ("!waiting", True), ("!running", False), ("!", True), ("  ", True),
    ],
)  # fmt: skip
def test_filter(wanted: str, found: bool) -> None:
    assert matches(row(7, tenant="acme"), wanted) is found


def test_filter_finds_what_is_on_screen_not_what_was_sent() -> None:
    assert matches(row(1, request_id="a\x1b[31mb"), "ab")


def test_orders() -> None:
    one, two, three = (
        row(1, "waiting", age_s=5.0, priority=2),
        row(2, age_s=9.0, priority=0, blocks=3, output_tokens=10),
        row(3, age_s=1.0, priority=1, blocks=7, output_tokens=190),
    )
    by = {sort: [r.id for r in rows(shown(one, two, three, sort=sort))] for sort in SORTS}
    assert by["order"] == [1, 2, 3]
    assert by["age"] == [2, 1, 3]
    assert by["priority"] == [2, 3, 1]
    assert by["blocks"] == [3, 2, 1]
    assert by["progress"] == [3, 2, 1]
    assert by["state"] == [2, 3, 1]
    assert [r.id for r in rows(shown(one, two, three, reverse=True))] == [3, 2, 1]


def test_equal_rows_stay_in_the_daemon_s_order() -> None:
    listed = [row(i, priority=0) for i in (5, 3, 9, 1)]
    assert [r.id for r in rows(shown(*listed, sort="priority"))] == [5, 3, 9, 1]


def test_progress_is_of_the_prompt_then_of_the_output() -> None:
    assert progress(row(1, "waiting")) == (0.0, "prompt 0%")
    assert progress(row(1, output_tokens=0, computed_tokens=256)) == (0.5, "prompt 50%")
    assert progress(row(1, output_tokens=50)) == (0.25, "50/200")


def test_states_differ_in_shape() -> None:
    columns = columns_for(80)
    states = [
        plain(table_row(row(1, state), columns, shown()))[20:22]
        for state in ("running", "waiting", "preempted", "swapped")
    ]
    assert len(set(states)) == 4


@pytest.mark.parametrize(("width", "least"), [(72, 12), (80, 12), (100, 24), (140, 44), (240, 48)])
def test_the_reason_has_room_before_the_name_gets_more(width: int, least: int) -> None:
    sizes = {column.key: size for column, size in columns_for(width)}
    assert sizes["why"] >= least
    assert sizes["request"] == 13 or sizes["why"] >= 48
    assert "WHY IT WAITS" in plain(table_head(columns_for(width), shown()))


@pytest.mark.parametrize("number", [7, 99999, 100000, 12345678])
def test_the_number_that_explain_takes_stands_first_and_whole(number: int) -> None:
    one = row(number)
    columns = columns_for(80, digits_of([row(1), one]))
    line = plain(table_row(one, columns, shown(one)))
    assert (len(line), line.split()[0]) == (80, str(number))
    assert plain(table_head(columns, shown(one))).split()[0] == "#"


def test_the_heading_says_why_they_wait() -> None:
    counts = status()
    counts.requests.waiting_by_reason = {"no slot": 1, "no blocks": 20}
    view = shown(row(1))
    view.yard.saw_status(counts, 1.0)
    assert "2 waiting (no blocks 20, no slot 1)" in plain(requests_heading(view, 80)[0])


def test_the_heading_tells_what_is_hidden() -> None:
    text = plain(requests_heading(shown(row(1), row(2), total=900, filter="0001"), 120)[0])
    assert "filter '0001': 1 of 2" in text and "first 2 of 900" in text


def test_details_hold_every_field() -> None:
    text = dict(details(row(4, "preempted", tenant="acme", preemptions=3, priority=-2), "no blocks"))
    assert text["why"] == "no blocks" and text["tenant"] == "acme"
    assert text["preempted"] == "3 times" and text["priority"] == "-2"


def test_the_table_says_who_was_preempted_for_whom() -> None:
    view = shown(row(1), row(2, "preempted", reason=""))
    view.yard.saw_step(Step(7, [Preempted(2, 1, "growth", "recompute", 512)]))
    columns = columns_for(120)
    assert "for req-0001 (growth)" in plain(table_row(view.yard.requests.rows[1], columns, view))  # type: ignore[union-attr]
    assert "(growth)" not in plain(table_row(row(1), columns, view))
