"""The screen as a person sees it, against a daemon on a real socket."""

from __future__ import annotations

import random

from kvyard.link.record import Preemption
from kvyard_tui.glyphs import ASCII
from kvyard_tui.widgets.table import RequestTable
from rich.cells import cell_len

from tests.tui.screen import (
    assert_whole,
    grid,
    line_with,
    serving,
    text,
    until,
    until_text,
    watched,
    watching,
)
from tests.tui.yard import quarantined, row


async def test_80x24_shows_latencies_apart() -> None:
    async with watched() as (_, app, _):
        assert line_with(app, "Queue time").split()[:7] == ["Queue", "time", "4.0", "ms", "1.25", "s", "150"]
        assert line_with(app, "TTFT").split()[:6] == ["TTFT", "85", "ms", "1.31", "s", "149"]
        assert line_with(app, "ITL").split()[:6] == ["ITL", "12", "ms", "18", "ms", "18,211"]
        assert_whole(app)


async def test_80x24_shows_kv_rates_policies_and_requests() -> None:
    async with watched() as (_, app, _):
        screen = text(app)
        for part in (
            "SmolLM2-135M-Instruct", "● ready", "read-only",
            "KV cache 2,048 blocks of 16, 1.0 GiB", "█ used 60%", "▒ cached 20%", "· free 20%",
            "340 tok/s", "1,234 tok/s", "12 ms p99 31 ms",
            "vllm-aging, generation 3", "admission  aging  rate=0.1", "9 µs",
            "finished 1,204", "refused 3",
            "3 of 16 running · 2 waiting (no blocks 2)", "▶ running", "2/200", "○ waiting", "prompt 0%", "no blocks",
            "the front started", "? Help", "x Swap", "D Drain",
        ):  # fmt: skip
            assert part in screen, f"{part!r} is not on screen:\n{screen}"


async def test_40x12_keeps_what_matters() -> None:
    async with watched((40, 12)) as (_, app, _):
        screen = text(app)
        for part in ("queue 4.0 ms", "TTFT 85 ms", "60% KV", "340 tok/s", "3 of 16 running", "req-0001", "▶"):
            assert part in screen, f"{part!r} is not on screen:\n{screen}"
        assert_whole(app)


async def test_200x60_adds_events_and_columns() -> None:
    async with watched((200, 60), rows=100) as (daemon, app, pilot):
        await daemon.event("ejected", "admission/lottery was put out: too-slow", step=77)
        await until_text(app, pilot, "ejected")
        screen = text(app)
        for part in ("Events newest first", "p99", "TENANT", "PROMPT", "AMD EPYC float32 deterministic", "step=77"):
            assert part in screen, f"{part!r} is not on screen:\n{screen}"
        assert_whole(app)


async def test_a_tiny_terminal_says_what_it_needs_and_grows_again() -> None:
    async with watched((10, 3)) as (_, app, pilot):
        assert "too small" in text(app)
        assert_whole(app)
        await pilot.resize_terminal(80, 24)
        await until_text(app, pilot, "Queue time")


async def test_a_storm_of_sizes_leaves_it_alive_and_drawn() -> None:
    """Here each size is drawn before the next; the quick storm is in test_terminal."""
    draw = random.Random(7)
    sizes = [(1, 1), (5, 3), (200, 60), (40, 12), (79, 24), (80, 21), (160, 24), (39, 10)]
    async with watched(rows=40) as (_, app, pilot):
        for _ in range(16):
            await pilot.resize_terminal(*draw.choice(sizes))
        await pilot.resize_terminal(200, 60)
        await until_text(app, pilot, "Events newest first")
        assert_whole(app)
        await pilot.resize_terminal(80, 24)
        await until_text(app, pilot, "req-0001")
        assert_whole(app)


async def test_names_of_every_kind_keep_the_columns() -> None:
    names = [
        "\u6f22\u5b57\u306e\u540d\u524d", "\U0001f468\u200d\U0001f469\u200d\U0001f467 family",
        "e\u0301\u0302\u0303\u0304",
        "\u0645\u0631\u062d\u0628\u0627", "a\tb", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07x", "[bold]markup[/bold]",
        "\U0001f1e9\U0001f1ea", "x\u202egnp", "\x9b2Jy", "a\nb",
    ]  # fmt: skip
    async with watched((80, 40)) as (daemon, app, pilot):
        daemon.rows = [row(i, request_id=name, tenant=name, reason=name) for i, name in enumerate(names)]
        await until_text(app, pilot, "family")
        assert_whole(app)
        lines = [one for one in grid(app) if "▶ running" in one]
        assert len(lines) == len(names)
        assert {cell_len(one[: one.index("▶")]) for one in lines} == {20}
        assert not any(ord(sign) < 32 or 0x7F <= ord(sign) < 0xA0 for sign in text(app).replace("\n", ""))
        assert "[bold]markup" in text(app)


async def test_no_news_is_told_with_its_age_and_the_picture_stays() -> None:
    async with watched() as (daemon, app, pilot):
        daemon.silent = True
        await until_text(app, pilot, "OLD", 12)
        assert "req-0001" in text(app)
        daemon.silent = False


async def test_the_daemon_goes_and_comes_back() -> None:
    async with watched() as (daemon, app, pilot):
        await daemon.stop()
        await until_text(app, pilot, "no connection")
        banner = line_with(app, "DATA ")
        assert "OLD" in banner and "no daemon answers" in banner
        assert "req-0001" in text(app) and "Queue time" in text(app)
        daemon.rows = [row(77)]
        daemon.status.uptime_s = 1.0
        await daemon.start()
        await until_text(app, pilot, "req-0077")
        assert "● ready" in text(app)
        assert "OLD" not in text(app)
        assert "req-0001" not in text(app)


async def test_it_starts_before_the_daemon_and_waits() -> None:
    async with serving() as daemon:
        await daemon.stop()
        daemon.path.unlink()
        async with watching(daemon.path) as (app, pilot):
            await until_text(app, pilot, "NO DATA YET")
            await daemon.start()
            await until_text(app, pilot, "req-0001")


async def test_a_daemon_of_another_protocol_is_named_not_crashed_on() -> None:
    async with serving() as daemon:
        daemon.protocol = 9
        async with watching(daemon.path, (160, 24)) as (app, pilot):
            await until_text(app, pilot, "speaks control protocol 9")


async def test_the_selection_stays_with_its_request_and_goes_with_it() -> None:
    async with watched() as (daemon, app, pilot):
        await pilot.press("down", "down")
        await until(pilot, lambda: app.choice.selected == 2)
        daemon.rows.insert(0, row(50))
        await until_text(app, pilot, "req-0050")
        assert app.choice.selected == 2
        daemon.rows = [one for one in daemon.rows if one.id != 2]
        await until(pilot, lambda: app.choice.selected is None)


async def test_after_a_restart_a_vanished_request_is_not_asked_for() -> None:
    async with watched() as (daemon, app, pilot):
        await pilot.press("down")
        await until(pilot, lambda: app.choice.selected == 1)
        await daemon.stop()
        await until_text(app, pilot, "no connection")
        daemon.rows = []
        daemon.calls.clear()
        await daemon.start()
        await until(pilot, lambda: app.choice.selected is None)
        assert {call.method for call in daemon.calls} <= {"lower", "status", "events", "subscribe", "requests"}


async def test_keys_move_by_row_page_and_edge() -> None:
    async with watched(rows=100) as (_, app, pilot):
        table = app.screen.query_one(RequestTable)
        await pilot.press("G")
        await until(pilot, lambda: app.choice.selected == 100)
        await until_text(app, pilot, "req-0100")
        await pilot.press("g")
        await until(pilot, lambda: app.choice.selected == 1)
        await pilot.press("pagedown")
        await until(pilot, lambda: app.choice.selected == 1 + table.size.height - 2)
        await pilot.press("k", "k", "j")
        await until(pilot, lambda: app.choice.selected == table.size.height - 2)
        await pilot.press("escape")
        await until(pilot, lambda: app.choice.selected is None)


async def test_keys_faster_than_the_screen_are_all_heard() -> None:
    async with watched() as (_, app, pilot):
        table = app.screen.query_one(RequestTable)
        for _ in range(3):
            table.action_move(1)
        await until(pilot, lambda: app.choice.selected == 3)


async def test_a_click_selects_and_a_title_sorts() -> None:
    async with watched() as (_, app, pilot):
        await pilot.click(RequestTable, offset=(3, 2))
        await until(pilot, lambda: app.choice.selected == 2)
        await pilot.click(RequestTable, offset=(33, 0))
        await until(pilot, lambda: app.choice.sort == "age")
        assert "AGE▼" in text(app)
        await pilot.click(RequestTable, offset=(33, 0))
        await until(pilot, lambda: app.choice.reverse)
        assert "AGE▲" in text(app)


async def test_filter_hides_rows_and_says_so() -> None:
    async with watched() as (_, app, pilot):
        await pilot.press("slash", *"!running", "enter")
        await until(pilot, lambda: app.choice.filter == "!running")
        await pilot.pause()
        assert "req-0001" not in text(app) and "req-0004" in text(app)
        assert "filter '!running': 2 of 5" in text(app)
        await pilot.press("slash", "escape")
        await until(pilot, lambda: app.choice.filter == "")
        await pilot.pause()
        assert "req-0001" in text(app)


async def test_what_the_filter_hides_is_not_selected() -> None:
    async with watched() as (_, app, pilot):
        await pilot.press("down")
        await until(pilot, lambda: app.choice.selected == 1)
        await pilot.press("slash", *"waiting", "enter")
        await until(pilot, lambda: app.choice.selected is None)


async def test_letters_in_the_filter_are_letters() -> None:
    async with watched() as (_, app, pilot):
        await pilot.press("slash", *"qxwD?", "enter")
        await until(pilot, lambda: app.choice.filter == "qxwD?")
        assert app.is_running and not app.writable


async def test_sort_goes_through_the_columns() -> None:
    async with watched() as (_, app, pilot):
        await pilot.press("s")
        await until(pilot, lambda: "#▼" in text(app))
        await pilot.press("s")
        await until(pilot, lambda: "REQUEST▼" in text(app))
        await pilot.press("S")
        await until(pilot, lambda: "REQUEST▲" in text(app))
        names = [one.split()[1] for one in grid(app) if one[6:].startswith("req-")]
        assert len(names) == 5
        assert names == sorted(names, reverse=True)


async def test_freeze_holds_the_picture() -> None:
    async with watched() as (daemon, app, pilot):
        await pilot.press("space")
        await until_text(app, pilot, "FROZEN")
        daemon.rows = [row(88)]
        await pilot.pause(1.6)
        assert "req-0001" in text(app) and "req-0088" not in text(app)
        await pilot.press("space")
        await until_text(app, pilot, "req-0088")
        assert "FROZEN" not in text(app)


async def test_help_lists_the_live_keys_and_dims_what_changes() -> None:
    async with watched() as (_, app, pilot):
        await pilot.press("question_mark")
        await until_text(app, pilot, "Every key that works here")
        screen = text(app)
        assert "Put another policy or discipline in charge" in screen
        await pilot.press("pagedown", "pagedown")
        await until_text(app, pilot, "Dimmed keys change the daemon: press w first.")
        await pilot.press("escape")
        await until(pilot, lambda: len(app.screen_stack) == 1)


async def test_events_and_details_open_and_stay_live() -> None:
    async with watched() as (daemon, app, pilot):
        await pilot.press("e")
        await pilot.pause(0.2)
        await daemon.event("restart", "the engine died: signal 9", signal=9)
        await until_text(app, pilot, "the engine died: signal 9")
        await pilot.press("escape", "down", "enter")
        await until_text(app, pilot, "512 tokens in KV")
        daemon.rows = daemon.rows[1:]
        await until_text(app, pilot, "no longer among the unfinished requests")
        await pilot.press("q")
        await until(pilot, lambda: len(app.screen_stack) == 1)


async def test_who_was_preempted_for_whom() -> None:
    async with watched((120, 30)) as (daemon, app, pilot):
        daemon.rows[1] = row(2, "preempted", reason="")
        await daemon.step([Preemption(2, 1, "growth", "recompute", 512)])
        await until_text(app, pilot, "for req-0001 (growth)")
        await pilot.press("down", "down", "enter")
        await until_text(app, pilot, "why         for req-0001 (growth)")


async def test_quarantine_overrides_and_errors_stand_out() -> None:
    async with watched((120, 30)) as (daemon, app, pilot):
        daemon.status.quarantine = [quarantined()]
        daemon.status.errors = {"timeout": 2, "internal": 1}
        daemon.status.policies[0].overrides = {"cannot-fit": 7}
        daemon.status.policies[0].ejections = 1
        await until_text(app, pilot, "quarantined for")
        line = line_with(app, "quarantined")
        assert "2 times" in line and "admission/lottery" in line and "too-slow" in line
        assert "errors timeout 2, internal 1" in text(app)
        assert "ejected 1x  cannot-fit 7" in line_with(app, "aging  ejected")
        daemon.status.policies[0].ejections, daemon.status.policies[0].ejected = 0, {"lottery": 2}
        await until_text(app, pilot, "aging  ejected lottery 2x  cannot-fit 7")


async def test_the_state_has_a_word_and_a_shape() -> None:
    async with watched() as (daemon, app, pilot):
        for field, value, words in (
            ("ready", False, "◐ not ready"),
            ("paused", True, "■ paused"),
            ("draining", True, "▼ draining"),
        ):
            setattr(daemon.status, field, value)
            await until_text(app, pilot, words)


async def test_a_stuck_engine_is_told() -> None:
    async with watched() as (daemon, app, pilot):
        daemon.status.engine.last_step_age_s = 9.0
        await until_text(app, pilot, "▲ no step for 9s")


async def test_palette_runs_the_screen_s_own_actions() -> None:
    async with watched() as (_, app, pilot):
        await pilot.press("colon")
        await pilot.pause(0.2)
        await pilot.press(*"freeze")
        await pilot.pause(0.5)
        await pilot.press("enter")
        await until_text(app, pilot, "FROZEN")


async def test_an_ascii_terminal_gets_ascii() -> None:
    async with watched((150, 30), glyphs=ASCII, readonly=False) as (daemon, app, pilot):
        daemon.rows[0].request_id = "\u6f22\u5b57"
        await until_text(app, pilot, "????")
        assert text(app).isascii()
        await pilot.press("x")
        await until_text(app, pilot, "vllm-aging -> sarathi")
        assert text(app).isascii(), [sign for sign in text(app) if not sign.isascii()]


async def test_every_theme_draws() -> None:
    async with watched() as (_, app, pilot):
        for name in ("kvyard-light", "kvyard-dark", "textual-ansi", "nord"):
            if name in app.available_themes:
                app.theme = name
                await pilot.pause()
                assert_whole(app)


async def test_news_is_drawn_at_most_three_times_a_second() -> None:
    async with watched(rows=150) as (daemon, app, pilot):
        drawn = 0
        original = app.redraw

        def counted() -> None:
            nonlocal drawn
            drawn += 1
            original()

        app.redraw = counted  # type: ignore[method-assign]  # counts the drawings, and draws
        daemon.push = 0.02
        await daemon.stop()
        await daemon.start()
        await until(pilot, lambda: app.yard.phase == "live")
        seen, drawn = daemon.status.engine.step, 0
        await pilot.pause(2.0)
        assert seen == daemon.status.engine.step
        assert drawn <= 9
