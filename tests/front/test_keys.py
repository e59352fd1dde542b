"""API keys in a file: made, read, looked up; what cannot be read is said by line, without showing it."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.front.keys import MOST_BYTES, KeyChange, KeyFileError, KeyRing, make_key, read_keys

names = st.from_regex(r"[A-Za-z0-9._@-]{1,64}", fullmatch=True)
tenants = st.text(st.characters(codec="utf-8", exclude_categories=["C"], exclude_characters=":"), max_size=40)


def test_no_two_keys_are_alike_and_a_key_is_not_in_its_line() -> None:
    made = [make_key("a") for _ in range(200)]
    assert len({secret for secret, _ in made}) == 200
    assert all(secret not in key.line and secret.startswith("kv-") and len(secret) > 40 for secret, key in made)


@given(names, tenants)
def test_a_line_brings_back_its_key(tmp_path_factory: pytest.TempPathFactory, name: str, tenant: str) -> None:
    file = tmp_path_factory.mktemp("keys") / "k"
    secret, key = make_key(name, tenant)
    file.write_text(key.line, encoding="utf-8")
    assert read_keys(file) == [key]
    found = KeyRing(file).find(secret)
    assert found is not None
    assert (found.name, found.tenant) == (name, tenant.strip() or name)


def test_many_keys_are_told_apart(tmp_path: Path) -> None:
    made = [make_key(f"n{at}", f"t{at % 3}") for at in range(50)]
    file = tmp_path / "k"
    file.write_text("\n".join(key.line for _, key in made))
    ring = KeyRing(file)
    assert len(ring) == 50
    assert [ring.find(secret) for secret, _ in made] == [key for _, key in made]
    for wrong in ("", "kv-", made[0][0][:-1], made[0][0] + "x", made[0][1].digest.hex(), "\udcff"):
        assert ring.find(wrong) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no key"),
        ("# only words\n\n", "no key"),
        ("secret-in-the-wrong-place", "line 1: a line is name:tenant"),
        ("a::md5$00", "line 1: a line is name:tenant"),
        ("# x\na::sha256$00", "line 2: after sha256"),
        ("a b::sha256$" + "0" * 64, "line 1: a key's name"),
        (":t:sha256$" + "0" * 64, "line 1: a key's name"),
        ("a:t\x01:sha256$" + "0" * 64, "line 1: a tenant"),
        (f"a::sha256${'0' * 64}\na::sha256${'1' * 64}", "'a' stands there twice"),
        (f"a::sha256${'0' * 64}\nb::sha256${'0' * 64}", "'b' stands there twice"),
    ],
)
def test_a_bad_file_is_refused_with_the_line_and_not_its_content(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "k"
    file.write_text(text)
    with pytest.raises(KeyFileError, match=str(file)) as error:
        read_keys(file)
    assert words in str(error.value)
    assert "secret" not in str(error.value)


def test_files_that_cannot_be_trusted_or_read(tmp_path: Path) -> None:
    file = tmp_path / "k"
    with pytest.raises(KeyFileError, match="No such file"):
        read_keys(file)
    file.write_bytes(b"a:\xff:sha256$" + b"0" * 64)
    with pytest.raises(KeyFileError, match="UTF-8"):
        read_keys(file)
    file.write_text(make_key("a")[1].line)
    file.chmod(0o646)
    with pytest.raises(KeyFileError, match="everybody may write"):
        read_keys(file)


def test_a_file_is_a_regular_one_of_bounded_size(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    for odd in (pipe, tmp_path, Path("/dev/zero")):
        with pytest.raises(KeyFileError, match=r"no regular file|Is a directory"):  # and at once
            read_keys(odd)
    line = make_key("a")[1].line + "\n"
    large.write_text(line + "#" * (MOST_BYTES - len(line)))
    assert len(read_keys(large)) == 1
    with large.open("a") as file:
        file.write("#")
    with pytest.raises(KeyFileError, match=r"larger than 1048576 bytes \(1 MiB\)"):
        read_keys(large)


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    secret, key = make_key("a")
    file = tmp_path / "k"
    file.write_text(key.line, encoding="utf-8-sig")
    assert KeyRing(file).find(secret) == key


def test_a_key_is_found_as_quickly_among_many(tmp_path: Path) -> None:
    made = [make_key(f"n{at}") for at in range(10_000)]
    file = tmp_path / "k"
    file.write_text("\n".join(key.line for _, key in made))
    ring = KeyRing(file)
    began = time.perf_counter()
    for secret, key in made:
        assert ring.find(secret) == key
    assert time.perf_counter() - began < 2, "a search through all of them takes a hundred times as long"


def test_a_load_that_fails_leaves_the_keys_in_force(tmp_path: Path) -> None:
    secret, key = make_key("a")
    file = tmp_path / "k"
    file.write_text(key.line)
    ring = KeyRing(file)
    file.write_text("nonsense")
    with pytest.raises(KeyFileError):
        ring.load(file)
    assert ring.required
    assert ring.find(secret) == key
    ring.load(None)
    assert not ring.required
    assert ring.find(secret) is None


@pytest.mark.parametrize(
    ("name", "tenant"), [("", ""), ("a:b", ""), ("a b", ""), ("a" * 65, ""), ("a", "x:y"), ("a", "x\ny")]
)
def test_names_that_a_line_cannot_hold(name: str, tenant: str) -> None:
    with pytest.raises(ValueError, match=r"name has|tenant has"):
        make_key(name, tenant)


def test_a_second_reading_tells_what_changed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = [make_key(name)[1] for name in ("a", "b", "c")]
    path.write_text("".join(f"{key.line}\n" for key in keys[:2]))
    ring = KeyRing(path)
    assert str(ring.load(path)) == ""
    renamed = replace(keys[0], name="z", tenant="z")
    path.write_text(f"{renamed.line}\n{keys[2].line}\n")
    assert ring.load(path) == KeyChange(added=1, revoked=1, renamed=1)
    assert str(ring.load(None)) == "api keys: 2 revoked"
    assert str(ring.load(path)) == "api keys: 2 added"
