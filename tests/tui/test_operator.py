"""What the person may change: read-only first, a question each time, Cancel first, a plain answer."""

from __future__ import annotations

import msgspec
import pytest
from textual.widgets import Button, OptionList

from tests.tui.screen import allow_changes, assert_whole, grid, text, until, until_text, watched
from tests.tui.yard import quarantined

CHANGING_KEYS = "xmcPDR"


async def test_read_only_keys_explain_and_send_nothing() -> None:
    async with watched() as (daemon, app, pilot):
        for key in CHANGING_KEYS:
            await pilot.press(key)
            await until_text(app, pilot, "read-only: press w")
            assert len(app.screen_stack) == 1
        assert daemon.changes() == []


async def test_the_watching_connection_gives_its_rights_away() -> None:
    async with watched(readonly=False) as (daemon, app, pilot):
        await pilot.press("P")
        await until_text(app, pilot, "Pause scheduling?")
        await pilot.press("right", "enter")
        await until_text(app, pilot, "■ paused")
        seen = {call.method: call.role for call in daemon.calls}
        assert seen["pause"] == "admin"
        assert {seen[method] for method in ("status", "requests", "subscribe", "events")} == {"viewer"}


async def test_elevation_asks_and_enter_alone_declines() -> None:
    async with watched() as (_, app, pilot):
        await pilot.press("w")
        await until_text(app, pilot, "Allow changes in this session?")
        await pilot.press("enter")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        assert not app.writable and "read-only" in text(app)
        await allow_changes(app, pilot)
        assert "CHANGES ALLOWED" in text(app)
        await pilot.press("w")
        await until_text(app, pilot, "Read-only again")
        assert not app.writable


async def test_a_viewer_is_told_why_it_cannot() -> None:
    async with watched(role="viewer") as (_, app, pilot):
        await pilot.press("w")
        await until_text(app, pilot, "lets you look only")
        assert len(app.screen_stack) == 1 and not app.writable


async def test_the_permission_ends_by_itself() -> None:
    now = [1000.0]
    async with watched(clock=lambda: now[0]) as (_, app, pilot):
        await allow_changes(app, pilot)
        now[0] += 901.0
        await until(pilot, lambda: not app.writable)


async def test_the_permission_is_for_one_daemon() -> None:
    async with watched() as (daemon, app, pilot):
        await allow_changes(app, pilot)
        greeted = app.yard.hello
        assert greeted is not None and app.writable
        app.yard.connected(greeted)
        assert app.writable, "the same daemon, after a pause"
        app.yard.connected(msgspec.structs.replace(greeted, pid=greeted.pid + 1))
        assert not app.writable, "at once, before anything is drawn"
        await until_text(app, pilot, "another daemon answers now")
        assert "CHANGES ALLOWED" not in text(app)
        await pilot.press("P")
        await until_text(app, pilot, "read-only: press w")
        assert daemon.changes() == []


# ---- swap ------------------------------------------------------------------------------------------------------


async def test_swap_lists_what_is_installed_and_what_is_broken() -> None:
    async with watched((100, 30), readonly=False) as (_, app, pilot):
        await pilot.press("x")
        await until_text(app, pilot, "needs API 2.0, this is 1.0")
        screen = text(app)
        for part in ("Swap a policy", "* discipline  vllm-aging           in charge", "sarathi", "yard-broken 0.1"):
            assert part in screen, f"{part!r} is not on screen:\n{screen}"
        options = app.screen.query_one(OptionList)
        assert options.get_option("admission/lottery").disabled


@pytest.mark.parametrize("size", [(40, 12), (60, 14), (80, 24), (200, 60)])
async def test_dialogs_show_their_buttons_at_every_size(size: tuple[int, int]) -> None:
    async with watched(size, readonly=False) as (_, app, pilot):
        for key, deed in (("x", "Swap"), ("m", "Set"), ("D", "Drain")):
            await pilot.press(key)
            await until(pilot, lambda: len(app.screen_stack) == 2)
            await until(pilot, lambda deed=deed: any("Cancel " in one and deed in one for one in grid(app)[:-1]))  # type: ignore[misc]  # loop's value
            assert_whole(app)
            assert size[0] < 76 or "esc leaves" in text(app), "no hint of the keys"
            await pilot.press("escape")
            await until(pilot, lambda: len(app.screen_stack) == 1)


async def test_swap_enter_alone_ends_in_cancel() -> None:
    async with watched(readonly=False) as (daemon, app, pilot):
        await pilot.press("x")
        await until_text(app, pilot, "vllm-aging -> sarathi")
        await pilot.press("enter", "enter")
        focused = app.screen.focused
        assert isinstance(focused, Button) and focused.id == "cancel"
        await pilot.press("enter")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        assert daemon.changes() == []


async def test_swap_before_the_list_came_is_cancel_too() -> None:
    async with watched(readonly=False) as (daemon, app, pilot):
        daemon.silent = True
        await pilot.press("x", "enter")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        assert daemon.changes() == []


async def test_swap_finds_by_typing() -> None:
    async with watched(readonly=False) as (daemon, app, pilot):
        await pilot.press("x")
        await until_text(app, pilot, "vllm-aging -> sarathi")
        await pilot.press(*"adm arrival")
        await until_text(app, pilot, "admission: aging -> fcfs")
        assert app.screen.query_one(OptionList).option_count == 1
        await pilot.press(*"zz")
        await until(pilot, lambda: app.screen.query_one(OptionList).option_count == 0)
        assert app.screen.query_one("#deed", Button).disabled
        await pilot.press("backspace", "backspace", "enter", "enter", "right", "enter")
        await until_text(app, pilot, "admission: aging -> fcfs")
        await until_text(app, pilot, "generation 4")
        assert [call.params["name"] for call in daemon.changes()] == ["fcfs"]


async def test_swap_shows_the_result_with_its_generation() -> None:
    async with watched(readonly=False) as (daemon, app, pilot):
        await pilot.press("x")
        await until_text(app, pilot, "vllm-aging -> sarathi")
        await pilot.press("enter", *"budget=512", "enter", "right", "enter")
        await until_text(app, pilot, "Done at step 123,500: generation 4. discipline: vllm-aging -> sarathi")
        assert "Close" in text(app)
        [call] = daemon.changes()
        assert call.params == {"kind": "discipline", "name": "sarathi", "params": {"budget": 512}}
        await pilot.press("enter")
        await until_text(app, pilot, "sarathi, generation 4")
        assert "Done at step" in text(app)


async def test_a_failed_swap_says_what_is_still_in_charge() -> None:
    async with watched(readonly=False) as (_, app, pilot):
        await pilot.press("x")
        await until_text(app, pilot, "vllm-aging -> sarathi")
        await pilot.press("enter", *"fail=true", "enter", "right", "enter")
        await until_text(app, pilot, "Not done: the candidate raised ValueError. In charge: discipline")
        await pilot.press("escape")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        assert "Done" not in text(app)


async def test_swap_to_what_is_in_charge_or_with_nonsense_cannot_be_pressed() -> None:
    async with watched(readonly=False) as (daemon, app, pilot):
        await pilot.press("x")
        await until_text(app, pilot, "vllm-aging -> sarathi")
        deed = app.screen.query_one("#deed", Button)
        await pilot.press("down")
        await until_text(app, pilot, "is in charge now")
        assert deed.disabled
        await pilot.press("enter", *"rate")
        await until_text(app, pilot, "write name=value, not 'rate'")
        assert deed.disabled and daemon.changes() == []


async def test_swap_by_an_operator_without_the_right_says_so() -> None:
    async with watched(role="operator", readonly=False) as (daemon, app, pilot):
        await pilot.press("D")
        await until_text(app, pilot, "Type 'drain' to go on")
        await pilot.press(*"drain", "enter", "right", "enter")
        await until_text(app, pilot, "Not done: drain needs the role admin")
        assert not daemon.status.draining


async def test_swap_shows_what_the_chosen_one_is_made_of() -> None:
    async with watched((100, 30), readonly=False) as (_, app, pilot):
        await pilot.press("x")
        await until_text(app, pilot, "vllm-aging -> sarathi")
        await pilot.press("enter")
        await until_text(app, pilot, "parts:")
        await pilot.press("shift+tab", "down", "down", "down", "enter")
        await until_text(app, pilot, "parameters:")


# ---- parameters ------------------------------------------------------------------------------------------------


async def test_a_parameter_is_changed() -> None:
    async with watched(readonly=False) as (daemon, app, pilot):
        await pilot.press("m")
        await until_text(app, pilot, "rate = 0.1")
        await pilot.press("enter")
        await until_text(app, pilot, "that is its value now")
        await pilot.press("backspace", "5")
        await until_text(app, pilot, "admission: rate = 0.1 -> 0.5")
        await pilot.press("enter", "right", "enter")
        await until_text(app, pilot, "Done at step 123,501: generation 4")
        assert [call.params for call in daemon.changes()] == [{"kind": "admission", "params": {"rate": 0.5}}]
        await pilot.press("enter")
        await until_text(app, pilot, "rate=0.5")


async def test_a_parameter_says_what_it_accepts_and_whether_it_is_live() -> None:
    async with watched((100, 30), readonly=False) as (_, app, pilot):
        await pilot.press("m")
        await until_text(app, pilot, "rate: number, at least 0, at most 10, per second. Gain of priority.")
        assert "chunk = 512  (vllm)  fixed until a swap" in text(app)
        assert app.screen.query_one(OptionList).get_option("prefill/chunk").disabled


async def test_a_refused_value_can_be_mended() -> None:
    async with watched(readonly=False) as (daemon, app, pilot):
        await pilot.press("m")
        await until_text(app, pilot, "rate = 0.1")
        await pilot.press("enter", "x", "enter", "right", "enter")
        await until_text(app, pilot, "rate takes a number, not '0.1x'. see policy show")
        assert not app.screen.query_one("#deed", Button).disabled
        assert daemon.status.policies[0].params == {"rate": 0.1}


# ---- requests and the whole daemon -----------------------------------------------------------------------------


async def test_cancel_asks_names_and_reports() -> None:
    async with watched(readonly=False) as (daemon, app, pilot):
        await pilot.press("c")
        await until_text(app, pilot, "Select a request first")
        await pilot.press("down", "down", "c")
        await until_text(app, pilot, "req-0002 is running, 3/200.")
        assert "Keep it" in text(app)
        await pilot.press("enter")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        assert daemon.changes() == []
        await pilot.press("c", "right", "enter")
        await until_text(app, pilot, "req-0002 cancelled")
        assert [call.params for call in daemon.changes()] == [{"request_id": "req-0002"}]
        await until(pilot, lambda: app.choice.selected is None)


async def test_a_request_that_ended_meanwhile_gives_one_error_line() -> None:
    async with watched(readonly=False) as (daemon, app, pilot):
        await pilot.press("down", "c")
        await until_text(app, pilot, "Cancel this request?")
        daemon.rows = daemon.rows[1:]
        await pilot.press("right", "enter")
        await until_text(app, pilot, "Not done: there is no request req-0001")


async def test_pause_turns_into_resume() -> None:
    async with watched(readonly=False) as (daemon, app, pilot):
        await pilot.press("P")
        await until_text(app, pilot, "3 running and 2 waiting requests stand still")
        await pilot.press("right", "enter")
        await until_text(app, pilot, "■ paused")
        await pilot.press("P")
        await until_text(app, pilot, "Resume scheduling?")
        await pilot.press("right", "enter")
        await until_text(app, pilot, "● ready")
        assert [call.method for call in daemon.changes()] == ["pause", "resume"]


async def test_drain_wants_its_name_typed() -> None:
    async with watched(readonly=False) as (daemon, app, pilot):
        await pilot.press("D")
        await until_text(app, pilot, "Drain SmolLM2-135M-Instruct?")
        deed = app.screen.query_one("#confirm", Button)
        await pilot.press(*"drai")
        assert deed.disabled
        await pilot.press("n")
        await until(pilot, lambda: not deed.disabled)
        await pilot.press("enter", "enter")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        assert daemon.changes() == []
        await pilot.press("D", *"drain", "enter", "right", "enter")
        await until_text(app, pilot, "▼ draining")
        assert [call.params for call in daemon.changes()] == [{"stop": True}]


async def test_release_from_quarantine() -> None:
    async with watched(readonly=False) as (daemon, app, pilot):
        await pilot.press("R")
        await until_text(app, pilot, "No policy is in quarantine")
        daemon.status.quarantine = [quarantined()]
        await until_text(app, pilot, "quarantined for")
        await pilot.press("R")
        await until_text(app, pilot, "admission/lottery was put out: too-slow")
        await pilot.press("right", "enter")
        await until_text(app, pilot, "admission/lottery released")
        assert daemon.status.quarantine == []


# ---- without a daemon ------------------------------------------------------------------------------------------


async def test_without_a_connection_every_press_gets_one_line() -> None:
    async with watched(readonly=False) as (daemon, app, pilot):
        await pilot.press("down")
        await daemon.stop()
        await until_text(app, pilot, "no connection")
        for key in "cPxmDR":
            for _ in range(5):
                await pilot.press(key)
            await until_text(app, pilot, "No connection to the daemon: nothing was sent")
            assert len(app.screen_stack) == 1
            assert text(app).count("nothing was sent") == 1
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running)
        assert app.return_code == 0


async def test_a_connection_lost_while_the_dialog_is_open() -> None:
    async with watched(readonly=False) as (daemon, app, pilot):
        await pilot.press("P")
        await until_text(app, pilot, "Pause scheduling?")
        await daemon.stop()
        await pilot.press("right", "enter")
        await until_text(app, pilot, "Not done: no daemon answers")
        assert app.is_running


async def test_swap_when_the_daemon_dies_under_it_can_be_left() -> None:
    async with watched(readonly=False) as (daemon, app, pilot):
        await pilot.press("x")
        await until_text(app, pilot, "vllm-aging -> sarathi")
        await daemon.stop()
        await pilot.press("enter", "enter", "right", "enter")
        await until_text(app, pilot, "no daemon answers")
        await pilot.press("escape")
        await until(pilot, lambda: len(app.screen_stack) == 1)
