"""`make mutants`: puts each mutation into a copy of the tree and runs the test that has to notice.

    python -m tests.mutants [PART OF A FAULT]

First all named tests run in a copy without a mutation, where they have to pass. A mutant is caught when its test
fails; a test that cannot be run, or takes longer than LIMIT_S, has noticed nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutations import MUTATIONS, ROOT, Mutation

PACKAGES = ("daemon", "plugins", "kernels", "tui")
COPIED = (*PACKAGES, "tests", "docs", "pyproject.toml", "README.md")
AT_ONCE = 2
LIMIT_S = 300
TESTS_FAILED = 1
"""pytest's exit status; others say that it could not run them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run of tests."""

    status: int | None
    """pytest's exit status; None when it took too long."""
    seconds: float
    output: str


def main(arguments: Sequence[str]) -> int:
    """Run those whose fault contains the argument, or all; 0 when every one was caught."""
    chosen = [mutation for mutation in MUTATIONS if all(part in mutation.fault for part in arguments)]
    if not chosen:
        print("no mutation's fault contains that; they are:", *(m.fault for m in MUTATIONS), sep="\n  ")
        return 2
    with tempfile.TemporaryDirectory(prefix="kvyard-mutants-") as name:
        pristine = copy_tree(Path(name) / "pristine")
        sane = run_tests(pristine, sorted({mutation.test for mutation in chosen}))
        if sane.status != 0:
            print(f"the tests do not pass without a mutation:\n{sane.output}")
            return 1
        print(f"without a mutation all named tests pass ({sane.seconds:.0f} s)", flush=True)
        outcomes = run_mutants(chosen, Path(name))
    return report(chosen, outcomes)


def copy_tree(target: Path) -> Path:
    """The working tree's sources, to be changed."""
    target.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target / name)
    return target


def run_tests(tree: Path, tests: Sequence[str]) -> Outcome:
    """Run tests of a copy against its own packages, which stand before the installed ones on the path."""
    paths = os.pathsep.join(str(tree / package) for package in PACKAGES)
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    check = f"import kvyard; assert kvyard.__file__.startswith({str(tree)!r}), kvyard.__file__"
    subprocess.run([sys.executable, "-c", check], env=env, cwd=tree, check=True)
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, env=env, cwd=tree, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        return Outcome(None, time.monotonic() - began, str(late))
    return Outcome(done.returncode, time.monotonic() - began, done.stdout[-3000:] + done.stderr[-1000:])


def run_mutants(chosen: Sequence[Mutation], folder: Path) -> dict[Mutation, Outcome]:
    """Each in a copy of its own, `AT_ONCE` at any time."""

    def one(number: int, mutation: Mutation) -> Outcome:
        tree = copy_tree(folder / str(number))
        mutation.apply(tree)
        outcome = run_tests(tree, [mutation.test])
        shutil.rmtree(tree)
        return outcome

    outcomes: dict[Mutation, Outcome] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = {pool.submit(one, number, mutation): mutation for number, mutation in enumerate(chosen)}
        for done in as_completed(running):
            outcomes[running[done]] = done.result()
            print(f"{len(outcomes)} of {len(chosen)}: {verdict(done.result())}: {running[done].fault}", flush=True)
    return outcomes


def verdict(outcome: Outcome) -> str:
    """In one word."""
    if outcome.status == TESTS_FAILED:
        return "caught"
    return {0: "MISSED", None: "TOO LATE"}.get(outcome.status, "NOT RUN")


def report(chosen: Sequence[Mutation], outcomes: dict[Mutation, Outcome]) -> int:
    """Print the table; the exit status."""
    width = max(len(mutation.fault) for mutation in chosen)
    print()
    for mutation in chosen:
        outcome = outcomes[mutation]
        name = mutation.test.partition("::")[2]
        print(f"{verdict(outcome):9}{mutation.fault:{width}}  {outcome.seconds:5.1f} s  {name}")
    caught = sum(verdict(outcome) == "caught" for outcome in outcomes.values())
    print(f"\n{caught} of {len(chosen)} mutations are caught by the test that names them")
    for mutation, outcome in outcomes.items():
        if verdict(outcome) == "NOT RUN":
            print(f"\n{mutation.fault}: pytest ended with {outcome.status}\n{outcome.output}")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
