"""What the screen knows, under a clock that the test turns."""

from __future__ import annotations

from kvyard.control.schema import Event, Hello, RequestPage
from kvyard_tui.model import (
    KEPT_EVENTS,
    KEPT_PREEMPTIONS,
    KEPT_SAMPLES,
    NOTICE_FOR,
    STALE_AFTER,
    History,
    Notice,
    Preempted,
    Shown,
    Step,
    Yard,
)
from msgspec.structs import replace

from tests.tui.yard import row, status


def sample(history: History, now: float, output: float) -> None:
    history.add(replace(status(), rates=replace(status().rates, output_tokens=output)), now)


def test_one_sample_a_second_and_the_last_one_counts() -> None:
    history = History()
    for now, output in ((10.0, 1.0), (10.5, 2.0), (11.2, 3.0), (11.9, 4.0)):
        sample(history, now, output)
    assert list(history.output) == [2.0, 4.0]
    assert len(history.prompt) == len(history.step) == 2


def test_a_gap_shows_as_a_gap() -> None:
    history = History()
    sample(history, 10.0, 1.0)
    sample(history, 14.0, 2.0)
    assert list(history.output) == [1.0, None, None, None, 2.0]


def test_history_is_bounded_even_after_a_night() -> None:
    history = History()
    sample(history, 0.0, 1.0)
    sample(history, 1e6, 2.0)
    assert len(history.output) == KEPT_SAMPLES
    assert history.output[-1] == 2.0


def test_a_copy_stands_still() -> None:
    yard = Yard()
    yard.saw_status(status(), 1.0)
    frozen = yard.copy()
    yard.saw_status(status(), 2.0)
    yard.saw_event(Event("events", 1.0, {}))
    assert (frozen.status_at, len(frozen.history.output), len(frozen.events)) == (1.0, 1, 0)
    assert len(yard.history.output) == 2


def test_what_was_seen_survives_the_loss_of_the_connection() -> None:
    yard = Yard()
    yard.connected(Hello(1, "0.1.0", "admin", 1))
    yard.saw_status(status(), 5.0)
    yard.lost("gone", 9.0)
    assert yard.status is not None and yard.phase == "lost" and yard.problem == "gone"
    yard.connected(Hello(1, "0.1.0", "admin", 2))
    assert (yard.phase, yard.problem, yard.retry_at) == ("live", "", None)


def test_the_log_is_ordered_bounded_and_not_doubled() -> None:
    yard = Yard()
    first, second = Event("events", 1.0, {"number": 1}), Event("events", 2.0, {"number": 2})
    yard.saw_log([second, first])
    yard.saw_event(Event("events", 2.0, {"number": 2}))
    assert list(yard.events) == [first, second]
    for number in range(KEPT_EVENTS + 50):
        yard.saw_event(Event("events", 3.0 + number, {"number": number}))
    assert len(yard.events) == KEPT_EVENTS


def test_a_row_is_found_while_it_is_unfinished() -> None:
    yard = Yard()
    assert yard.row(1) is None
    yard.saw_requests(RequestPage(1, [row(1)]))
    found = yard.row(1)
    assert found is not None and found.request_id == "req-0001"
    assert yard.row(2) is None and yard.row(None) is None


def test_data_is_stale_when_old_or_without_a_connection() -> None:
    yard = Yard()
    assert Shown(yard, 0.0).stale is None
    yard.connected(Hello(1, "0.1.0", "admin", 1))
    yard.saw_status(status(), 10.0)
    assert Shown(yard, 10.0 + STALE_AFTER - 0.1).stale is None
    assert Shown(yard, 10.0 + STALE_AFTER + 1).stale == STALE_AFTER + 1
    yard.lost("gone", 12.0)
    assert Shown(yard, 10.5).stale == 0.5


def test_a_notice_fades() -> None:
    notice = Notice("done", "good", 10.0)
    assert Shown(Yard(), 10.0 + NOTICE_FOR - 0.1, notice=notice).live_notice is notice
    assert Shown(Yard(), 10.0 + NOTICE_FOR, notice=notice).live_notice is None
    assert Shown(Yard(), 10.0).live_notice is None


def took(sequence: int, by: int, cause: str = "growth") -> Preempted:
    return Preempted(sequence, by, cause, "recompute", 100)


def test_why_tells_for_whom_it_gave_way_while_it_waits() -> None:
    yard = Yard()
    yard.saw_requests(RequestPage(3, [row(1), row(2, "preempted", reason=""), row(3, "swapped")]))
    yard.saw_step(Step(7, [took(2, 1), took(3, 3), took(1, 99)]))
    assert yard.why(row(2, "preempted", reason="")) == "for req-0001 (growth)"
    assert yard.why(row(3, "swapped")) == "for itself (growth); no blocks"
    assert yard.why(row(1)) == ""
    yard.saw_step(Step(8, [took(2, 99, "admission")]))
    assert yard.why(row(2, "preempted")) == "for sequence 99 (admission); no blocks"
    assert yard.why(row(5, "preempted")) == "no blocks"


def test_preemptions_are_bounded_and_the_newest_stay() -> None:
    yard = Yard()
    for number in range(KEPT_PREEMPTIONS + 10):
        yard.saw_step(Step(number, [took(number, 0), took(5, 0)]))
    assert len(yard.preempted) == KEPT_PREEMPTIONS
    assert 5 in yard.preempted and 6 not in yard.preempted


def test_TUI_06_another_daemon_on_the_same_socket_has_none_of_the_old_requests() -> None:
    """Every daemon numbers its sequences from 1: an id that was selected must not name another request."""
    yard = Yard()
    yard.connected(Hello(1, "0.1.0", "admin", 1))
    yard.saw_status(replace(status(), uptime_s=100.0), 1000.0)
    yard.saw_requests(RequestPage(1, [row(1)]))
    yard.saw_step(Step(7, [Preempted(1, 2, "growth", "recompute", 16)]))
    yard.lost("the connection ended", 1002.0)
    yard.connected(Hello(1, "0.1.0", "admin", 1))
    yard.saw_status(replace(status(), uptime_s=105.2), 1005.0)
    assert yard.row(1) is not None, "the same daemon after a moment without connection"
    yard.connected(Hello(1, "0.1.0", "admin", 1))
    yard.saw_status(replace(status(), uptime_s=4.0), 1010.0)
    assert yard.row(1) is None
    assert not yard.preempted
