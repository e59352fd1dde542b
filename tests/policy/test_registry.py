"""The registry: listing without importing, loading with checks, errors that name the plugin."""

from __future__ import annotations

import py_compile
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvyard.policy import API, KINDS, AdmissionPolicy, Kind, ParamError
from kvyard.policy.registry import Listing, RegistryError, list_policies, load, load_discipline

from tests.policy.distributions import install

ADMISSION = """
    from kvyard.policy import AdmissionPolicy, PolicyParams, live

    class Mine(AdmissionPolicy):
        '''Lets everybody in.

        More about it.
        '''
        api = (1, 0)

        class Params(PolicyParams):
            share: float = live(0.5, ge=0, le=1)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path; what is imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def put(site: Path, module: str, source: str, target: str, kind: str = "admission", name: str = "mine") -> None:
    install(site, module, f"[kvyard.{kind}]\n{name} = {module}:{target}\n", modules={module: source})


def refusal(kind: Kind, name: str) -> RegistryError:
    with pytest.raises(RegistryError) as caught:
        load(kind, name)
    return caught.value


def row(listing: Listing, kind: str, name: str) -> tuple[str, str, str, str]:
    (found,) = [entry for entry in listing.policies if (entry.kind, entry.name) == (kind, name)]
    return found.distribution, found.api, found.doc, found.problem


def test_listing_tells_distribution_api_and_doc_without_importing(site: Path) -> None:
    put(site, "plugin_one", ADMISSION, "Mine")
    listing = list_policies()
    assert row(listing, "admission", "mine") == ("plugin_one", "1.0", "Lets everybody in.", "")
    assert "plugin_one" not in sys.modules


def test_listing_survives_a_source_that_cannot_be_parsed(site: Path) -> None:
    put(site, "plugin_two", "def (:", "Mine")
    problem = "SyntaxError in plugin_two.py, line 1: invalid syntax"
    assert row(list_policies(), "admission", "mine") == ("plugin_two", "1.0", "", problem)


@pytest.mark.parametrize(
    ("source", "target", "problem"),
    [
        (ADMISSION, "Mine", ""),
        (ADMISSION, "Yours", "there is no class 'Yours' in plugin_two.py"),
        ("import kvyard_no_such_module", "Mine", "it imports 'kvyard_no_such_module', which is not installed"),
        ("from kvyard_no_such.deep import Mine", "Mine", "it imports 'kvyard_no_such', which is not installed"),
        # Nothing is said of what may still be all right.
        ("from kvyard.policy import AdmissionPolicy as Mine", "Mine", ""),
        ("try:\n    import kvyard_no_such_module\nexcept ImportError:\n    Mine = None", "Mine", ""),
        ("if True:\n    class Mine: pass", "Mine", ""),
        ("import kvyard.policy.base\nMine = kvyard.policy.base.AdmissionPolicy", "Mine", ""),
        ("from kvyard.policy import *", "AdmissionPolicy", ""),
        ("def __getattr__(name): return name", "Mine", ""),
        ("globals()['Mine'] = 1", "Mine", ""),
        ("def make():\n    global Mine\n    Mine = 1\nmake()", "Mine", ""),
        ("import sys\nsys.path.append('elsewhere')\nimport kvyard_no_such_module as Mine", "Mine", ""),
        ("class Outer:\n    class Mine: pass", "Outer.Mine", ""),
        ("import plugin_two as Mine", "Mine", ""),
    ],
)
def test_listing_marks_what_can_certainly_not_be_loaded(site: Path, source: str, target: str, problem: str) -> None:
    put(site, "plugin_two", source, target)
    assert row(list_policies(), "admission", "mine")[3] == problem
    assert "plugin_two" not in sys.modules
    if problem:
        assert refusal("admission", "mine").code == "import"


@pytest.mark.parametrize("module", ["plugin_nowhere", "plugin_package.nowhere", "plugin_package.deep.nowhere"])
def test_listing_marks_a_module_that_is_not_there(site: Path, module: str) -> None:
    entry_points = f"[kvyard.admission]\nmine = {module}:Mine\n"
    install(site, "plugin", entry_points, modules={"plugin_package.__init__": "raise RuntimeError('imported')"})
    assert row(list_policies(), "admission", "mine")[3] == f"there is no module {module!r} to import"


def test_a_module_that_is_no_source_is_not_marked(site: Path) -> None:
    put(site, "plugin_two", ADMISSION, "Mine")
    (site / "plugin_two.py").rename(site / "source.txt")
    py_compile.compile(str(site / "source.txt"), str(site / "plugin_two.pyc"), doraise=True)
    assert row(list_policies(), "admission", "mine")[3] == ""
    assert load("admission", "mine").distribution == "plugin_two"


def test_a_module_that_comes_after_the_folder_was_searched_is_found(site: Path) -> None:
    install(
        site, "plugin", "[kvyard.admission]\nmine = plugin_late:Mine\n", modules={"plugin_late": "import plugin_x"}
    )
    assert row(list_policies(), "admission", "mine")[3] == "it imports 'plugin_x', which is not installed"
    (site / "plugin_x.py").write_text("")
    (site / "plugin_late.py").write_text("import plugin_x as Mine")
    assert row(list_policies(), "admission", "mine")[3] == ""


def test_listing_is_sorted_and_holds_the_built_in_ones() -> None:
    listing = list_policies()
    order = [(entry.kind, entry.name) for entry in listing.policies]
    kinds = [*KINDS, "discipline"]
    assert order == sorted(order, key=lambda pair: (kinds.index(pair[0]), pair[1]))
    assert all(entry.doc for entry in listing.policies if entry.distribution == "kvyard")
    assert not [entry for entry in listing.policies if entry.problem]


def test_load_constructs_with_parameters(site: Path) -> None:
    put(site, "plugin_three", ADMISSION, "Mine")
    loaded = load("admission", "mine", {"share": 0.25})
    assert isinstance(loaded.policy, AdmissionPolicy)
    assert loaded.policy.params.values() == {"share": 0.25}
    assert (loaded.distribution, loaded.version, loaded.name) == ("plugin_three", "1.0", "mine")


def test_refused_parameters_are_told_as_such(site: Path) -> None:
    put(site, "plugin_four", ADMISSION, "Mine")
    with pytest.raises(ParamError, match="at most 1"):
        load("admission", "mine", {"share": 7.0})


def test_an_unknown_name_lists_what_there_is() -> None:
    error = refusal("admission", "vlm")
    assert error.code == "unknown"
    assert "'vlm'" in str(error)
    assert "installed are: aging, " in str(error)
    assert "whole-life" in str(error)
    with pytest.raises(RegistryError, match=r"no discipline 'nope'.*kvyard.*vllm"):
        load_discipline("nope")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(RegistryError, match="'order' is no kind"):
        load("order", "x")  # type: ignore[arg-type]  # what a client may send


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import kvyard_no_such_module", "ModuleNotFoundError"),
        ("raise SystemExit(3)", "SystemExit"),
        ("raise BaseException('deep')", "BaseException: deep"),
        ("def (:", "SyntaxError"),
        ("x = 1", "AttributeError"),
        ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "E"),
    ],
)
def test_a_plugin_that_fails_to_import_is_named(site: Path, source: str, words: str) -> None:
    put(site, "plugin_five", source, "Mine")
    error = refusal("admission", "mine")
    assert error.code == "import"
    assert "plugin_five" in str(error)
    assert words in str(error)


def test_a_broken_plugin_leaves_the_others_usable(site: Path) -> None:
    put(site, "plugin_six", "raise RuntimeError", "Mine")
    put(site, "plugin_seven", ADMISSION, "Mine", name="other")
    refusal("admission", "mine")
    assert load("admission", "other").distribution == "plugin_seven"
    assert load("admission", "vllm").distribution == "kvyard"


def test_a_constructor_that_raises_is_named(site: Path) -> None:
    source = ADMISSION + "\n        def __init__(self, **values): raise OSError('no file')\n"
    put(site, "plugin_eight", source, "Mine")
    error = refusal("admission", "mine")
    assert error.code == "construct"
    assert "OSError: no file" in str(error)


@pytest.mark.parametrize(
    "body",
    [
        "def __init__(self, **values): self.seen = 0",
        "def __init__(self, **values): self.params = {}",
        "def __new__(cls, **values): return 7",
    ],
)
def test_a_constructor_that_leaves_its_base_out_is_told_what_is_missing(site: Path, body: str) -> None:
    put(site, "plugin_eight", f"{ADMISSION}\n        {body}\n", "Mine")
    error = refusal("admission", "mine")
    assert error.code == "construct"
    assert "its __init__ must call super().__init__(**values)" in str(error)


def test_parameters_that_raise_where_they_are_looked_at_are_told(site: Path) -> None:
    body = "params = property(lambda self: 1 / 0, lambda self, value: None)"
    put(site, "plugin_eight", f"{ADMISSION}\n        {body}\n", "Mine")
    error = refusal("admission", "mine")
    assert error.code == "construct"
    assert "ZeroDivisionError" in str(error)


def test_a_policy_of_another_kind_is_refused(site: Path) -> None:
    put(site, "plugin_nine", ADMISSION, "Mine", kind="prefill")
    assert refusal("prefill", "mine").code == "not-a-policy"


@pytest.mark.parametrize(
    ("api", "good"),
    [
        ((API[0], 0), True),
        (API, True),
        ((API[0], API[1] + 1), False),
        ((API[0] + 1, 0), False),
        ((0, 9), False),
    ],
)
def test_the_api_version_is_negotiated(site: Path, api: tuple[int, int], good: bool) -> None:
    put(site, "plugin_ten", ADMISSION.replace("(1, 0)", repr(api)), "Mine")
    shown = row(list_policies(), "admission", "mine")
    assert shown[1] == f"{api[0]}.{api[1]}"
    if good:
        assert shown[3] == ""
        assert load("admission", "mine").policy.api == api
        return
    error = refusal("admission", "mine")
    assert error.code == "api"
    assert shown[3] in str(error)
    assert f"{api[0]}.{api[1]}" in str(error)
    assert f"{API[0]}.{API[1]}" in str(error)


def test_an_api_that_is_no_version_is_refused(site: Path) -> None:
    put(site, "plugin_eleven", ADMISSION.replace("(1, 0)", "'one'"), "Mine")
    assert refusal("admission", "mine").code == "api"


def test_every_built_in_policy_loads() -> None:
    for entry in list_policies().policies:
        if entry.kind == "discipline":
            loaded = load_discipline(entry.name)
            for kind, (name, params) in loaded.parts.items():
                assert load(kind, name, params).policy.kind == kind
        else:
            kind = next(known for known in KINDS if known == entry.kind)
            policy = load(kind, entry.name).policy
            assert policy.name == entry.name, "the class and its entry point agree on the name"
            assert all(spec["doc"] or spec["unit"] for spec in policy.params.describe())


def test_a_discipline_may_be_an_object_of_the_module(site: Path) -> None:
    source = """
        from kvyard.policy import Discipline
        mine = Discipline()
        mine.parts = {"admission": ("a", {}), "preemption": ("b", {"x": 1}), "prefill": ("c", {})}
        short = Discipline()
        short.parts = {"admission": ("a", {})}
        other = 3
    """
    put(site, "plugin_twelve", source, "mine", kind="disciplines")
    put(site, "plugin_short", source, "short", kind="disciplines", name="short")
    put(site, "plugin_other", source, "other", kind="disciplines", name="other")
    assert load_discipline("mine").parts["preemption"] == ("b", {"x": 1})
    with pytest.raises(RegistryError, match="names no preemption policy"):
        load_discipline("short")
    with pytest.raises(RegistryError, match="is no Discipline"):
        load_discipline("other")


def test_a_new_plugin_is_found_without_a_restart(site: Path) -> None:
    assert refusal("admission", "mine").code == "unknown"
    put(site, "plugin_thirteen", ADMISSION, "Mine")
    assert load("admission", "mine").distribution == "plugin_thirteen"
