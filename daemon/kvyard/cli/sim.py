"""`kvyard sim`: disciplines in virtual time, over recorded arrivals and decision traces. No daemon is asked."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvyard.cli.commands import App
from kvyard.cli.errors import FAILED, USAGE, CliError
from kvyard.cli.options import JsonOption
from kvyard.cli.output import clean, duration, say, say_json, table

if TYPE_CHECKING:
    from kvyard.core.conduct import ConductLimits
    from kvyard.core.plan import Limits
    from kvyard.sim.arrivals import Arrival
    from kvyard.sim.cost import Machine

TELL_EVERY = (0.2, 10.0)
"""Seconds between two lines of progress: on a terminal, and elsewhere."""
DEFAULT_MACHINE = "llama-8b-h100"

ArrivalsArgument = Annotated[
    Path, typer.Argument(help="Arrivals: CSV, or Mooncake's JSON lines (.jsonl).", metavar="FILE")
]
DisciplineOption = Annotated[
    list[str],
    typer.Option(
        "--discipline",
        "-d",
        help="Discipline, with changes as NAME,kind.param=value or NAME,kind=POLICY; vllm if none is named "
        "(`kvyard serve` takes kvyard).",
        metavar="NAME",
        show_default=False,
    ),
]
DisciplinesOption = Annotated[
    list[str] | None,
    typer.Option("--discipline", "-d", help="One of those compared; all if none is named.", show_default=False),
]
MachineOption = Annotated[str, typer.Option("--machine", help="Model and device (`kvyard sim machines`).")]
UntilOption = Annotated[
    float | None, typer.Option("--until", help="Take so many seconds of the trace.", show_default=False)
]
ReplayedOption = Annotated[
    list[str] | None,
    typer.Option(
        "--discipline",
        "-d",
        help="Discipline, as for `sim run`; the one that the file names, else vllm.",
        metavar="NAME",
        show_default=False,
    ),
]
READ = (
    "CSV, a column each: arrival_s (seconds from the start), prompt_tokens, output_tokens; may be there and empty: "
    "max_tokens (what the client asks for), tenant (text), priority (integer, lower is more urgent), deadline_s "
    "(seconds after its arrival).\n\n"
    "JSON lines, for files that end in .jsonl: timestamp (milliseconds), input_length, output_length; may be there: "
    "max_tokens, hash_ids (one for each 512 prompt tokens; equal ids are equal tokens).\n\n"
    "Others are not read, and named in a note."
)
"""Shown below the options of those that read arrivals."""
RateOption = Annotated[float, typer.Option("--rate", help="Let arrivals come so many times as densely.")]
MaxTokensOption = Annotated[
    int | None,
    typer.Option("--max-tokens", help="What clients ask for at most; without it what they get.", show_default=False),
]
BlocksOption = Annotated[int | None, typer.Option("--blocks", help="KV blocks of the pool.", show_default=False)]
RunningOption = Annotated[int | None, typer.Option("--max-running", help="Places.", show_default=False)]
TokensOption = Annotated[int | None, typer.Option("--step-tokens", help="Tokens of a step.", show_default=False)]
SwapOption = Annotated[int | None, typer.Option("--swap-blocks", help="Blocks of the host pool.", show_default=False)]
ConductOption = Annotated[
    bool, typer.Option("--conduct", help="Put out who stands still or starves others, as the daemon does.")
]
RequestsOption = Annotated[bool, typer.Option("--requests", help="Also a line for each request.")]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = App(help="Disciplines in virtual time: run, compared, replayed.")
    group.command(epilog=READ)(run)
    group.command(epilog=READ)(compare)
    for command in (replay, machines):
        group.command()(command)
    group.command("prefill-vs-decode")(prefill_vs_decode)
    app.add_typer(group, name="sim")


def run(
    arrivals: ArrivalsArgument,
    disciplines: DisciplineOption = ["vllm"],  # noqa: B006 - read by the library, never changed
    machine: MachineOption = DEFAULT_MACHINE,
    until: UntilOption = None,
    rate: RateOption = 1.0,
    max_tokens: MaxTokensOption = None,
    blocks: BlocksOption = None,
    max_running: RunningOption = None,
    step_tokens: TokensOption = None,
    swap_blocks: SwapOption = None,
    conduct: ConductOption = False,
    requests: RequestsOption = False,
    json: JsonOption = False,
) -> None:
    """Run a discipline over arrivals, and print figures of the whole, or also of each request."""
    from kvyard.sim import figures
    from kvyard.sim.compare import simulate

    discipline = _single(disciplines)
    with told_errors(), Bar(discipline) as bar:
        load, chosen = _load(arrivals, until, rate, max_tokens), _machine(machine)
        limits = _limits(chosen, load, blocks, max_running, step_tokens, swap_blocks)
        result = simulate(discipline, load, chosen, limits, bar, _conduct(conduct))
    totals = figures.totals(result, chosen.objective, limits.blocks)
    single = figures.requests(result)
    head = {"discipline": discipline, "machine": chosen.name, "arrivals": str(arrivals), "rate": rate}
    if json:
        say_json({**head, "totals": totals, "requests": single, "policies": result.state})
        return
    say(f"{clean(discipline)} over {len(load)} requests at {rate:g} times their rate")
    say("\n".join(_conditions(chosen, limits)))
    say("\n".join(_outline(totals)))
    if requests:
        say("\n".join(_request_table(single)))
    _tell_ejected(totals)


def compare(
    arrivals: ArrivalsArgument,
    discipline: DisciplinesOption = None,
    machine: MachineOption = DEFAULT_MACHINE,
    until: UntilOption = None,
    rate: RateOption = 1.0,
    max_tokens: MaxTokensOption = None,
    blocks: BlocksOption = None,
    max_running: RunningOption = None,
    step_tokens: TokensOption = None,
    swap_blocks: SwapOption = None,
    conduct: ConductOption = False,
    json: JsonOption = False,
) -> None:
    """Run several disciplines over the same arrivals, and print their figures side by side."""
    from kvyard.sim import compare as sides
    from kvyard.sim import disciplines

    with told_errors():
        load, chosen = _load(arrivals, until, rate, max_tokens), _machine(machine)
        limits = _limits(chosen, load, blocks, max_running, step_tokens, swap_blocks)
        names = discipline or disciplines.names()
        with Bar("") as bar:
            results = list(sides.compare(names, load, chosen, limits, bar.of, _conduct(conduct)))
    if json:
        say_json({"machine": chosen.name, "rate": rate, "requests": len(load), "disciplines": dict(results)})
        return
    say(f"{len(load)} requests at {rate:g} times their rate")
    say("\n".join(_conditions(chosen, limits)))
    say("\n".join(table(*sides.table_of(results))))
    for _, totals in results:
        _tell_ejected(totals)


def replay(
    trace: Annotated[Path, typer.Argument(help="A decision trace.", metavar="FILE")],
    replayed: ReplayedOption = None,
    json: JsonOption = False,
) -> None:
    """Replay a decision trace, and say in how many steps the discipline decides alike; 1 where one differs."""
    from kvyard.sim import disciplines
    from kvyard.sim import replay as replaying

    named = _single(replayed) if replayed else None
    with told_errors():
        read = replaying.read_trace(trace)
        discipline = named or replaying.discipline_of(read)
        name, changes, parts = disciplines.parse(discipline)
        with Bar(discipline) as bar:
            result = replaying.replay(read, name, changes, lambda done, total: bar(done, total, float(done)), parts)
    first = result.first_difference
    if json:
        say_json({"steps": result.steps, "equal": result.equal, "first_difference": first})
    else:
        say(f"{result.equal} of {result.steps} steps are equal to {clean(discipline)}'s")
    if first and not json:
        say(f"first difference in step {first['step']}, {first['field']}:")
        say(f"  expected  {clean(str(first['expected']))}")
        say(f"  found     {clean(str(first['found']))}")
    if first:
        raise typer.Exit(FAILED)


def machines(json: JsonOption = False) -> None:
    """List the models and devices whose step times are known."""
    from kvyard.sim.cost import MACHINES

    if json:
        say_json(list(MACHINES.values()))
        return
    rows = [(machine.name, str(machine.limits.blocks), machine.doc) for machine in MACHINES.values()]
    say("\n".join(table(("MACHINE", "BLOCKS", "WHAT IT IS"), rows)))


def prefill_vs_decode(
    discipline: DisciplinesOption = None,
    machine: MachineOption = "smollm2-135m-cpu2",
    prompts: Annotated[int, typer.Option("--prompts", help="Long prompts, one a second.", min=1)] = 20,
    live: Annotated[bool, typer.Option("--live", help="Also on a daemon, over HTTP; one is started for it.")] = False,
    model: Annotated[str, typer.Option("--model", help="Model of that daemon.", show_default=False)] = "",
    socket: Annotated[
        Path | None,
        typer.Option("--socket", help="Measure the daemon there instead.", show_default=False, metavar="PATH"),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show who waits when long prompts come while others decode: 8 decoders, a prompt of 2,000 tokens a second."""
    from kvyard.sim import prefill_decode as load

    with told_errors():
        chosen = _machine(machine)
        names = discipline or list(load.DISCIPLINES)
        results = {"virtual": {name: load.measure(name, chosen, prompts) for name in names}}
        if live or socket is not None:
            results["live"] = _live(socket, model, chosen, names, prompts)
    if json:
        say_json({"machine": chosen.name, "prompts": prompts, **results})
        return
    say(f"virtual: {clean(chosen.doc)}")
    rows = [(where, *load.row(name, found)) for where, group in results.items() for name, found in group.items()]
    say("\n".join(table(("TIME", *load.HEAD), rows)))


def _live(socket: Path | None, model: str, machine: Machine, names: list[str], prompts: int) -> dict[str, Any]:
    from kvyard.cli import sim_live

    if socket is not None:
        return sim_live.measure(socket, names, prompts)
    sys.stderr.write(f"starting a daemon; each discipline then takes about {prompts + 5} s\n")
    with sim_live.own_daemon(model, machine.limits.max_step_tokens) as own:
        return sim_live.measure(own, names, prompts)


class Bar:
    """Progress on standard error: one line that is rewritten on a terminal, now and then a line elsewhere."""

    def __init__(self, name: str) -> None:
        self._name = clean(name)
        self._terminal = sys.stderr.isatty()
        self._every = TELL_EVERY[0] if self._terminal else TELL_EVERY[1]
        self._told = time.monotonic()

    def of(self, name: str) -> Bar:
        """The same line from now on tells of `name`."""
        self._name = clean(name)
        return self

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def __call__(self, done: int, total: int, seconds: float) -> None:
        """So many of all are done, at so many seconds of virtual time."""
        now = time.monotonic()
        if done >= total:
            self.clear()
        elif now - self._told >= self._every:
            self._told = now
            line = f"{self._name}: {done} of {total}, {duration(seconds)} of virtual time"
            sys.stderr.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
            sys.stderr.flush()

    def clear(self) -> None:
        """Leave the terminal as it was."""
        if self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


@contextmanager
def told_errors() -> Iterator[None]:
    """Whatever is wrong with a file, a name or a parameter, as an error for people."""
    from kvyard.policy.params import ParamError
    from kvyard.policy.registry import RegistryError
    from kvyard.sim.arrivals import ArrivalError
    from kvyard.sim.replay import TraceError
    from kvyard.sim.simulation import Stalled

    try:
        yield
    except ArrivalError as error:
        raise CliError(str(error), "see `kvyard sim run --help` for what is read", USAGE, "bad-file") from error
    except TraceError as error:
        hint = "decision traces are those of tests/data/traces and tests/data/golden, with a README each"
        raise CliError(str(error), hint, USAGE, "bad-file") from error
    except RegistryError as error:
        hint = "for example -d vllm,admission.watermark=0.01" if error.code == "bad-params" else _LISTED
        raise CliError(str(error), hint, USAGE, "bad-params") from error
    except ParamError as error:
        hint = "for example -d vllm,admission.watermark=0.01; docs/disciplines.md says what they do"
        raise CliError(str(error), hint, USAGE, "bad-params") from error
    except Stalled as error:
        raise CliError(str(error), "the discipline does not serve this load with these limits") from error


_LISTED = "`kvyard policy list` shows what is installed"


def _single(named: list[str]) -> str:
    """The only one that was named."""
    if len(named) > 1:
        both = " ".join(f"-d {clean(name, 40)}" for name in named)
        hint = f"`kvyard sim compare FILE {both}` shows several side by side"
        raise CliError(f"one discipline at a time, not {len(named)}", hint, USAGE, "bad-params")
    return named[0]


def _load(path: Path, until: float | None, rate: float, max_tokens: int | None) -> list[Arrival]:
    from kvyard.sim.arrivals import read_arrivals

    if not 0 < rate < float("inf"):
        hint = "--rate 2 lets arrivals come twice as densely, --rate 0.5 half"
        raise CliError(f"the rate is a positive factor, not {rate:g}", hint, USAGE, "bad-params")
    ignored: set[str] = set()
    load = read_arrivals(path, until=until, rate=rate, max_tokens=max_tokens, ignored=ignored)
    if ignored:
        names = ", ".join(clean(name, 40) for name in sorted(ignored)[:20])
        sys.stderr.write(f"kvyard: note: not read from {clean(str(path))}: {names}\n")
    return load


def _machine(name: str) -> Machine:
    from kvyard.sim.cost import MACHINES

    if name not in MACHINES:
        raise CliError(
            f"there is no machine {clean(name)!r}", f"known are {', '.join(MACHINES)}", USAGE, "bad-params"
        )
    return MACHINES[name]


def _conduct(as_the_daemon: bool) -> ConductLimits:
    from kvyard.core.conduct import ConductLimits
    from kvyard.sim.simulation import UNDISTURBED

    return ConductLimits() if as_the_daemon else UNDISTURBED


def _limits(
    machine: Machine,
    load: list[Arrival],
    blocks: int | None,
    max_running: int | None,
    step_tokens: int | None,
    swap_blocks: int | None,
) -> Limits:
    """The machine's limits with those that were given; the prefix cache is on where prompts have contents."""
    given = {"blocks": blocks, "max_running": max_running, "max_step_tokens": step_tokens, "swap_blocks": swap_blocks}
    for name, value in given.items():
        most = 100_000 if name == "max_running" else 10_000_000
        if value is not None and not (0 if name == "swap_blocks" else 1) <= value <= most:
            least = f"from {0 if name == 'swap_blocks' else 1} to {most:,}"
            flag = {"max_step_tokens": "step-tokens"}.get(name, name.replace("_", "-"))
            hint = f"--{flag} is a number of {_COUNTED[name]}"
            raise CliError(f"{name} is {least}, not {value}", hint, USAGE, "bad-params")
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(machine.limits, prefix_cache=any(arrival.hash_ids for arrival in load), **changes)


_COUNTED = {
    "blocks": "KV blocks",
    "max_running": "requests that run at once",
    "max_step_tokens": "tokens",
    "swap_blocks": "blocks of the host pool",
}


def _conditions(machine: Machine, limits: Limits) -> list[str]:
    """What the figures hold for."""
    good = machine.objective
    return [
        f"on {machine.name}: {clean(machine.doc)}",
        f"{limits.blocks:,} KV blocks of {limits.block_size} tokens, {limits.max_running} places,"
        f" {limits.max_step_tokens:,} tokens a step",
        f"good: first token within {good.ttft:g} s, {1e3 * good.tpot:g} ms a token after it on average",
    ]


def _outline(totals: dict[str, Any]) -> list[str]:
    lines = []
    for name, value in totals.items():
        if name.endswith("_s") and isinstance(value, dict):
            text = "  ".join(f"{which} {duration(seconds)}" for which, seconds in value.items())
        elif isinstance(value, dict):
            text = "  ".join(f"{which} {_short(item)}" for which, item in value.items()) or "none"
        else:
            text = ", ".join(value) or "none" if isinstance(value, list) else _short(value)
        lines.append(f"  {name:20} {clean(text)}")
    return lines


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _request_table(single: list[dict[str, Any]]) -> list[str]:
    head = ("REQUEST", "ARRIVAL", "QUEUE", "TTFT", "TPOT", "WORST ITL", "E2E", "TOKENS", "PREEMPTED", "RECOMPUTED")
    times = ("arrival_s", "queue_s", "ttft_s", "tpot_s", "worst_itl_s", "e2e_s")
    numbers = ("output_tokens", "preemptions", "recomputed_tokens")
    rows = [
        (str(one["request"]), *(duration(one[name]) for name in times), *(str(one[name]) for name in numbers))
        for one in single
    ]
    return table(head, rows)


def _tell_ejected(totals: dict[str, Any]) -> None:
    for text in totals["ejected"]:
        sys.stderr.write(
            f"kvyard: {clean(text)}; the built-in took over, and the figures are its own from there on\n"
        )
