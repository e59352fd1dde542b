"""What is installed, what of it runs, and what is said to a word that is no kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvyard import __version__
from kvyard.control.schema import PolicyRow, QuarantineEntry
from kvyard.front import policy_listing
from kvyard.front.operations import OperationError
from kvyard.front.policy_listing import describe_installed, installed_version, listing, no_such_kind, vet
from kvyard.policy.base import BUILTIN, KINDS
from kvyard.policy.registry import Installed, Listing

from tests.policy.distributions import install


def row(rows: list[PolicyRow], kind: str, name: str) -> PolicyRow:
    (found,) = [each for each in rows if (each.kind, each.name) == (kind, name)]
    return found


@pytest.fixture
def upgraded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1.1.0 of a plugin is installed."""
    mine = Installed("admission", "mine", "plugin", "1.1.0", "m:Mine", "1.0", "Mine.", "")
    monkeypatch.setattr(policy_listing, "list_policies", lambda: Listing([mine], []))


@pytest.mark.usefixtures("upgraded")
@pytest.mark.parametrize(
    ("active", "expected"),
    [
        ({("admission", "mine"): "1.0.0"}, (True, "1.0.0", "1.1.0")),
        ({("admission", "mine"): "1.1.0"}, (True, "1.1.0", "")),
        ({("admission", "mine"): ""}, (True, "1.1.0", "")),
        ({}, (False, "1.1.0", "")),
    ],
)
def test_the_version_that_runs_is_shown(active: dict[tuple[str, str], str], expected: tuple[bool, str, str]) -> None:
    mine = row(listing(active, []).policies, "admission", "mine")
    assert (mine.active, mine.version, mine.installed) == expected


def test_the_built_in_is_listed_while_it_is_in_charge() -> None:
    rows = listing({("prefill", BUILTIN): "", ("admission", "vllm"): ""}, []).policies
    found = row(rows, "prefill", BUILTIN)
    assert found.active and "put out" in found.doc
    assert not [each for each in rows if each.kind == "admission" and each.name == BUILTIN]


def test_a_name_where_a_kind_belongs() -> None:
    error = no_such_kind("sglang")
    assert (error.code, error.message) == ("bad-kind", "'sglang' is not a kind of policy")
    assert error.hint.startswith("did you mean discipline/sglang or ")
    assert "admission/sglang" in error.hint


def test_the_built_in_is_a_name_too() -> None:
    assert no_such_kind(BUILTIN).hint.startswith("did you mean discipline/builtin or admission/builtin or ")


async def test_a_disciplines_parts_with_their_parameters() -> None:
    shown = await describe_installed("discipline", "kvyard", parts=True)
    assert tuple(shown["parts"]) == KINDS
    admission = shown["parts"]["admission"]
    values = {param["name"]: (param["value"], param["default"]) for param in admission["parameters"]}
    assert values and all(values[name][0] == value for name, value in admission["params"].items())
    plain = await describe_installed("discipline", "kvyard")
    assert plain["parts"]["admission"] == {"name": admission["name"], "params": admission["params"]}


def test_a_word_that_names_nothing() -> None:
    hint = no_such_kind("weather").hint
    assert "did you mean" not in hint
    for words in ("admission", "preemption", "prefill", "KIND/NAME", "discipline/NAME"):
        assert words in hint


@pytest.mark.usefixtures("upgraded")
@pytest.mark.parametrize(("version", "away"), [("1.1.0", True), ("", True), ("1.0.0", False)])
def test_only_the_version_in_quarantine_is_marked(version: str, away: bool) -> None:
    entry = QuarantineEntry("admission/mine", "raised", "no", None, 1, version)
    assert ("in quarantine" in row(listing({}, [entry]).policies, "admission", "mine").problem) is away


def test_the_installed_version() -> None:
    assert installed_version("admission/vllm") == __version__
    assert installed_version("admission/nobody") == ""


PLUGIN = """
    import os, signal
    from kvyard.policy import AdmissionPolicy

    print("a plugin that talks")
    os.write(1, b"{}")


    class Mine(AdmissionPolicy):
        '''Lets everybody in.'''

        def __init__(self, **values):
            {body}
"""


async def described(site: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> dict[str, object]:
    """What the scratch process says of a policy whose constructor is `body`."""
    source = PLUGIN.replace("{body}", body)
    install(site, "plugin", "[kvyard.admission]\nmine = plugin:Mine\n", modules={"plugin": source})
    monkeypatch.setenv("PYTHONPATH", str(site))
    return await describe_installed("admission", "mine")


async def test_what_a_plugin_prints_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = await described(tmp_path, monkeypatch, "super().__init__(**values)")
    assert (shown["distribution"], shown["doc"]) == ("plugin", "Lets everybody in.")


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("self.seen = 0", "construct", "its __init__ must call super().__init__(**values)"),
        ("super().__init__(**values); self.api = 1", "construct", "cannot be described: TypeError"),
        (
            "os._exit(3)",
            "crashed",
            "ended the scratch process that loaded it, which exited with status 3; nothing changed",
        ),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed", "which died of SIGSEGV"),
    ],
)
async def test_a_policy_that_cannot_be_described_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, code: str, words: str
) -> None:
    with pytest.raises(OperationError) as refusal:
        await described(tmp_path, monkeypatch, body)
    assert refusal.value.code == code
    assert words in refusal.value.message


async def test_what_is_vetted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        from kvyard.policy import AdmissionPolicy, Discipline

        class Mine(AdmissionPolicy):
            pass

        class Theirs(Discipline):
            parts = {"admission": ("mine", {}), "preemption": ("vllm", {}), "prefill": ("vllm", {})}
    """
    points = "[kvyard.admission]\nmine = plugin:Mine\n[kvyard.disciplines]\ntheirs = plugin:Theirs\n"
    install(tmp_path, "plugin", points, modules={"plugin": source})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert await vet("admission", "mine") == {"admission/mine"}
    parts = {"admission/mine", "preemption/vllm", "prefill/vllm"}
    assert await vet("discipline", "theirs") == {"discipline/theirs", *parts}
    assert await vet("admission", "nobody") == {"admission/nobody"}
