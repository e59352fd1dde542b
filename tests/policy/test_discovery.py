"""Discovery: one bad distribution hides nobody, and every problem is told in words."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
from kvyard.policy.discovery import discover

from tests.policy.distributions import install

GOOD = """
[kvyard.admission]
good = good_plugin:Good
"""
BROKEN: dict[str, str | bytes] = {
    "line before any section": "good = good_plugin:Good\n",
    "duplicate key": "[kvyard.admission]\na = m:A\na = m:B\n",
    "duplicate section": "[kvyard.admission]\na = m:A\n[kvyard.admission]\nb = m:B\n",
    "no utf-8": b"[kvyard.admission]\n\xff\xfe = m:A\n",
    "no section header at all": b"\x00\x01\x02",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
def test_a_malformed_distribution_hides_nobody_and_is_named(tmp_path: Path, text: str | bytes) -> None:
    install(tmp_path, "aaa-broken", text)
    install(tmp_path, "good-plugin", GOOD)
    found = discover([str(tmp_path)])
    assert found.names("admission") == ["good"]
    assert len(found.problems) == 1
    assert "aaa-broken" in found.problems[0]
    assert "\n" not in found.problems[0]


def test_a_percent_sign_is_no_interpolation(tmp_path: Path) -> None:
    install(tmp_path, "odd", "[console_scripts]\nx = m:f%(y)s\n[kvyard.admission]\nodd = m:Odd\n")
    found = discover([str(tmp_path)])
    assert found.names("admission") == ["odd"]
    assert found.problems == []


@pytest.mark.parametrize("target", ["not an entry point!", "", "module:", "only.a.module"])
def test_a_bad_reference_is_a_problem_and_the_next_line_counts(tmp_path: Path, target: str) -> None:
    install(tmp_path, "half", f"[kvyard.prefill]\nbad = {target}\nfine = m:Fine\n")
    found = discover([str(tmp_path)])
    assert found.names("prefill") == ["fine"]
    assert len(found.problems) == 1
    assert "half" in found.problems[0]
    assert "'bad'" in found.problems[0]


@pytest.mark.parametrize("group", ["kvyard.discipline", "kvyard.policies", "kvyard.Admission"])
def test_a_group_that_nobody_reads_is_named(tmp_path: Path, group: str) -> None:
    install(
        tmp_path, "half", f"[{group}]\nmine = m:Mine\n[kvyard.disciplines]\nfine = m:Fine\n[other.group]\na = b:c\n"
    )
    found = discover([str(tmp_path)])
    assert found.names("discipline") == ["fine"]
    (problem,) = found.problems
    assert f"half: nothing is read from the entry points '{group}'" in problem
    assert "kvyard.admission, kvyard.preemption, kvyard.prefill, kvyard.disciplines" in problem


def test_an_unreadable_file_is_a_problem(tmp_path: Path) -> None:
    install(tmp_path, "good-plugin", GOOD)
    (tmp_path / "dir-1.0.dist-info" / "entry_points.txt").mkdir(parents=True)
    found = discover([str(tmp_path)])
    assert found.names("admission") == ["good"]
    assert len(found.problems) == 1
    assert found.problems[0].startswith("dir:")


def test_names_and_versions_come_from_the_metadata(tmp_path: Path) -> None:
    install(tmp_path, "my-pkg", GOOD, version="2.5")
    offer = discover([str(tmp_path)]).offers["admission", "good"]
    assert (offer.distribution, offer.version) == ("my-pkg", "2.5")


def test_without_metadata_the_folder_names_the_distribution(tmp_path: Path) -> None:
    install(tmp_path, "my-pkg", GOOD, version="2.5", metadata=False)
    offer = discover([str(tmp_path)]).offers["admission", "good"]
    assert (offer.distribution, offer.version) == ("my_pkg", "2.5")


def test_two_distributions_with_one_name_have_a_stated_winner(tmp_path: Path) -> None:
    install(tmp_path / "first", "zeta", "[kvyard.admission]\nsame = zeta:A\n")
    install(tmp_path / "second", "alpha", "[kvyard.admission]\nsame = alpha:A\n")
    found = discover([str(tmp_path / "first"), str(tmp_path / "second")])
    assert found.offers["admission", "same"].distribution == "zeta"
    assert len(found.problems) == 1
    assert "zeta is used" in found.problems[0]
    assert "alpha" in found.problems[0]


def test_a_built_in_name_cannot_be_taken(tmp_path: Path) -> None:
    install(tmp_path / "first", "intruder", "[kvyard.admission]\nvllm = intruder:A\n")
    install(tmp_path / "second", "kvyard", "[kvyard.admission]\nvllm = kvyard_policies.vllm:VllmAdmission\n")
    found = discover([str(tmp_path / "first"), str(tmp_path / "second")])
    assert found.offers["admission", "vllm"].distribution == "kvyard"
    assert "kvyard is used" in found.problems[0]


def test_the_same_name_in_two_kinds_is_no_conflict(tmp_path: Path) -> None:
    install(tmp_path, "both", "[kvyard.admission]\nx = m:A\n[kvyard.prefill]\nx = m:B\n")
    found = discover([str(tmp_path)])
    assert set(found.offers) == {("admission", "x"), ("prefill", "x")}
    assert found.problems == []


def test_an_earlier_copy_of_a_distribution_shadows_a_later_one(tmp_path: Path) -> None:
    install(tmp_path / "new", "my-pkg", "[kvyard.admission]\nnew = m:A\n", version="2")
    install(tmp_path / "old", "my_pkg", "[kvyard.admission]\nold = m:A\n", version="1")
    found = discover([str(tmp_path / "new"), str(tmp_path / "old")])
    assert found.names("admission") == ["new"]
    assert found.problems == []


def test_a_zip_on_the_path_is_searched(tmp_path: Path) -> None:
    archive = tmp_path / "wheel.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("zipped-1.0.dist-info/entry_points.txt", GOOD)
    assert discover([str(archive)]).names("admission") == ["good"]


def test_a_file_that_is_no_zip_is_passed_over(tmp_path: Path) -> None:
    odd = tmp_path / "odd.txt"
    odd.write_text("no archive")
    assert discover([str(odd), str(tmp_path / "missing")]).offers == {}


def test_discovery_imports_nothing(tmp_path: Path) -> None:
    install(
        tmp_path, "loud", "[kvyard.admission]\nloud = loud_plugin:Loud\n", modules={"loud_plugin": "raise SystemExit"}
    )
    assert discover([str(tmp_path)]).names("admission") == ["loud"]
    assert "loud_plugin" not in sys.modules


def test_the_built_in_policies_are_found_the_same_way() -> None:
    found = discover()
    assert {"aging", "vllm", "whole-life"} <= set(found.names("admission"))
    assert {"kvyard", "vllm"} <= set(found.names("discipline"))
    assert found.offers["admission", "vllm"].distribution == "kvyard"
