"""The prefix cache: what a digest covers, who may share, and what is found."""

from __future__ import annotations

import struct
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard.core.loops import Blocks
from kvyard.core.plan import SequenceSpec, TokenArray
from kvyard.core.prefix import DIGEST_BYTES, ROOTS, DigestChain, PrefixIndex
from kvyard.core.scheduler import Scheduler

from tests.core.harness import Clock, limits, run_all, run_step, spec
from tests.core.scripted import scripted_set


def scheduler(salt: bytes = b"s", **changes: int) -> Scheduler:
    made = limits(prefix_cache=True, block_size=16, **changes)
    return Scheduler(made, scripted_set(), clock_ns=Clock(), salt=salt)


def cached_of(target: Scheduler, **changes: object) -> int:
    """Serve one sequence alone; its prompt tokens found in the cache."""
    target.add(spec(**changes))  # type: ignore[arg-type]
    first = run_step(target)
    run_all(target)
    return next(iter(first.cached.values()))


# ---- the chain -------------------------------------------------------------------------------------------------


def digests(salt: bytes, *blocks: bytes, root: bytes | None = None) -> list[bytes]:
    chain, out = DigestChain(salt), bytearray()
    for block in blocks:
        chain.extend(out, root or chain.root("", ""), block, len(block))
    return each(out)


def each(digests: bytearray) -> list[bytes]:
    return [bytes(digests[at : at + DIGEST_BYTES]) for at in range(0, len(digests), DIGEST_BYTES)]


def test_prefix_02_digests_are_cryptographic_and_new_with_every_start() -> None:
    (one,), (two,) = digests(b"one", b"tokens"), digests(b"two", b"tokens")
    assert one != two
    assert len(one) == DIGEST_BYTES >= 16


def test_a_digest_covers_everything_before_it() -> None:
    assert digests(b"s", b"a", b"c")[1] != digests(b"s", b"b", b"c")[1]
    assert digests(b"s", b"a", b"c") == digests(b"s", b"a", b"c")
    assert digests(b"s", b"a", root=b"r" * 16) != digests(b"s", b"a", root=b"q" * 16)


def test_many_blocks_at_once_are_the_same_as_one_by_one() -> None:
    chain, at_once = DigestChain(b"s"), bytearray()
    chain.extend(at_once, chain.root("", ""), b"aabbcc", 2)
    assert each(at_once) == digests(b"s", b"aa", b"bb", b"cc")


def test_one_more_block_is_the_same_as_all_at_once() -> None:
    chain = DigestChain(b"s")
    first = chain.next(chain.root("", ""), b"aa")
    assert [first, chain.next(first, b"bb")] == digests(b"s", b"aa", b"bb")


@pytest.mark.parametrize(
    ("one", "other"),
    [(("a", "bc"), ("ab", "c")), (("a", ""), ("", "a")), (("", ""), ("\x00", "")), (("é", ""), ("e", ""))],
)
def test_prefix_09_tenant_and_salt_are_told_apart(one: tuple[str, str], other: tuple[str, str]) -> None:
    chain = DigestChain(b"s")
    assert chain.root(*one) != chain.root(*other)
    assert chain.root(*one) == chain.root(*one)


def test_any_text_is_a_salt() -> None:
    assert DigestChain(b"").root("\ud800", "x" * 10_000)


def test_a_root_is_the_same_however_many_others_were_asked_for_since() -> None:
    chain = DigestChain(b"s")
    first = chain.root("a", "")
    others = {chain.root(str(number), "") for number in range(2 * ROOTS)}
    assert chain.root("a", "") == first
    assert len(others) == 2 * ROOTS
    assert len(chain._roots) <= ROOTS


# ---- the index -------------------------------------------------------------------------------------------------


def index_of(blocks: int) -> PrefixIndex:
    return PrefixIndex(Blocks.of(blocks, cached=True))


def table(*blocks: int) -> TokenArray:
    return np.array(blocks, np.int32)


def test_duplicates_live_side_by_side_and_the_oldest_is_found() -> None:
    index = index_of(4)
    name = b"n" * 16
    index.publish(table(2, 0, 3), name * 3)
    assert index.find(name) == 2
    index.forget(table(2))
    assert index.find(name) == 0
    index.forget(table(3, 3))
    assert index.find(name) == 0
    index.forget(table(0))
    assert index.find(name) is None
    assert index.audit() == []
    assert index.evicted == 3


def test_a_block_keeps_its_first_name() -> None:
    index = index_of(1)
    index.publish(table(0), b"a" * 16)
    index.publish(table(0), b"b" * 16)
    assert index.find(b"a" * 16) == 0
    assert index.find(b"b" * 16) is None
    assert index.digest(0) == b"a" * 16


def test_names_are_taken_and_found_by_their_number() -> None:
    index, names = index_of(4), bytearray(b"a" * 16 + b"b" * 16 + b"c" * 16)
    index.publish(table(3, 1), names, 1)
    assert [index.find(names, number) for number in range(3)] == [None, 3, 1]
    names += b"d" * 16  # nothing holds on to it
    assert index.find(names, 3) is None


@pytest.mark.parametrize("word", range(4))
def test_every_word_of_a_digest_counts(word: int) -> None:
    index = index_of(4)
    one, other = bytearray(16), bytearray(16)
    other[4 * word] = 1
    index.publish(table(2), one)
    assert index.find(other) is None
    index.publish(table(1), other)
    assert (index.find(one), index.find(other)) == (2, 1)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), blocks=st.integers(1, 24), homes=st.integers(1, 6))
def test_it_finds_what_a_dictionary_would(seed: int, blocks: int, homes: int) -> None:
    """Few homes and many names: they stand in each other's places, and gaps are closed around the table's end."""
    random, index = Random(seed), index_of(blocks)
    known: dict[bytes, list[int]] = {}
    named: dict[int, bytes] = {}
    names = [
        struct.pack("<iiii", random.choice((-1, 1, 2**31 - 1)) - random.randrange(homes), number // 2, -number, 5)
        for number in range(12)
    ]
    forgotten = 0
    for _ in range(80):
        some = random.sample(range(blocks), random.randint(1, blocks))
        if random.random() < 0.5:
            given_names = [random.choice(names) for _ in some]
            index.publish(table(*some), b"".join(given_names))
            for block, name in zip(some, given_names, strict=True):
                if block not in named:
                    named[block] = name
                    known.setdefault(name, []).append(block)
        else:
            index.forget(table(*some))
            for block in some:
                if block in named:
                    forgotten += 1
                    known[named.pop(block)].remove(block)
        assert [index.find(name) for name in names] == [next(iter(known.get(name, ())), None) for name in names]
        assert {block: index.digest(block) for block in range(blocks)} == {b: named.get(b) for b in range(blocks)}
        assert index.audit() == []
    assert index.evicted == forgotten


# ---- through the scheduler -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32)])
def test_prefix_07_and_08_all_full_blocks_but_one_token_stays_to_compute(length: int, cached: int) -> None:
    target = scheduler()
    assert cached_of(target, id=1, prompt_len=length, tokens=range(length)) == 0
    assert cached_of(target, id=2, prompt_len=length, tokens=range(length)) == cached


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"tenant": "a", "cache_salt": "bc"}, {"tenant": "ab", "cache_salt": "c"}),
        ({}, {"tenant": "a"}),
        ({"cache_salt": "x"}, {"tenant": "x"}),
    ],
)
def test_prefix_09_no_tenant_reads_another_ones_kv(one: dict[str, str], other: dict[str, str]) -> None:
    target = scheduler()
    assert cached_of(target, id=1, tokens=range(64), max_new=2, **one) == 0
    assert cached_of(target, id=2, tokens=range(64), max_new=2, **other) == 0
    assert cached_of(target, id=3, tokens=range(64), max_new=2, **one) == 48


def test_prefix_03_evicted_content_is_not_found() -> None:
    target = scheduler(blocks=8)
    assert cached_of(target, id=1, tokens=range(64), max_new=2) == 0
    assert cached_of(target, id=2, tokens=range(1000, 1112), max_new=2) == 0
    assert cached_of(target, id=3, tokens=range(64), max_new=2) == 0


def test_prefix_05_hits_are_looked_up_when_it_comes_in() -> None:
    target = scheduler(blocks=8, max_running=1)
    assert cached_of(target, id=1, tokens=range(64), max_new=2) == 0
    target.add(spec(2, tokens=range(1000, 1100), max_new=3))
    run_step(target)
    target.add(spec(3, tokens=range(64), max_new=2))
    (row,) = [view for view in target.snapshot.waiting if view.id == 3]
    assert row.hits == 3
    while target.has_work():
        log = run_step(target)
        if 3 in log.cached:
            break
    assert log.plan is not None
    assert log.cached[3] == 16, "what was there earlier is not what is there now"
    assert int(log.plan.computed[list(log.scheduled).index(3)]) == 16


@pytest.mark.parametrize(
    ("isolate", "other", "cached"),
    [
        (True, {"tenant": "a"}, 48),
        (True, {"tenant": "b"}, 0),
        (True, {"tenant": "a", "cache_salt": "x"}, 0),
        (False, {"tenant": "b"}, 48),
        (False, {}, 48),
        (False, {"tenant": "a", "cache_salt": "x"}, 0),
        (False, {"tenant": "b", "cache_salt": "x"}, 0),
    ],
)
def test_who_shares_a_prefix(isolate: bool, other: dict[str, str], cached: int) -> None:
    target = scheduler(isolate_tenants=isolate)
    assert cached_of(target, id=1, tokens=range(50), tenant="a") == 0
    assert cached_of(target, id=2, tokens=range(50), **other) == cached


def test_a_salt_is_shared_over_tenants_only_without_isolation() -> None:
    for isolate, cached in ((True, 0), (False, 48)):
        target = scheduler(isolate_tenants=isolate)
        assert cached_of(target, id=1, tokens=range(50), tenant="a", cache_salt="x") == 0
        assert cached_of(target, id=2, tokens=range(50), tenant="b", cache_salt="x") == cached


def test_prefix_12_generated_tokens_are_cached_under_what_they_are() -> None:
    target = scheduler()
    target.add(spec(1, tokens=range(15), max_new=3))
    run_all(target)  # token 16 is the fixed token 7
    same, other = [*range(15), 7, 99], [*range(15), 8, 99]
    assert cached_of(target, id=2, tokens=other, max_new=1) == 0
    assert cached_of(target, id=3, tokens=same, max_new=1) == 16


def test_a_later_newcomer_of_the_same_step_shares_what_is_granted_in_it() -> None:
    target = scheduler()
    target.add(spec(1, tokens=range(40)))
    target.add(spec(2, tokens=range(40)))
    log = run_step(target)
    assert log.cached == {1: 0, 2: 32}
    assert target.blocks_used == 4


def test_a_victim_that_a_newcomer_builds_on_stays_in_this_step() -> None:
    """Its fresh blocks are read by the newcomer in this very step, so they must be computed."""
    target = scheduler()
    target.add(spec(1, tokens=range(40)))
    target.add(spec(2, tokens=range(20)))
    plan = target.schedule(0.0)
    first, second = (target.ledger.sequences[id] for id in (1, 2))
    assert [entry.cached for entry in plan.admitted] == [0, 16]
    assert not target._moves.may_preempt(first)
    assert target._moves.may_preempt(second)
    target._moves.preempt(second, first, "growth", "recompute", front=True)
    assert target._moves.may_preempt(first), "nobody builds on it any more"


def test_blocks_of_a_failed_step_are_not_found() -> None:
    target = scheduler()
    target.add(spec(1, tokens=range(40)))
    target.add(spec(2, tokens=range(40)))
    target.abandon(target.schedule(0.0))
    assert (target.blocks_used, target.blocks_cached) == (0, 0)
    assert [row.state for row in target.request_rows(9)] == ["waiting", "waiting"]
    target.take_record_parts()
    assert run_step(target).cached == {1: 0, 2: 32}


def test_leak_03_caching_holds_no_blocks() -> None:
    target = scheduler(blocks=64)
    for id in range(1, 21):
        target.add(
            SequenceSpec(id, id, id, 0.0, 128, 8, prompt=np.arange(id * 1000, id * 1000 + 128, dtype=np.int32))
        )
        run_all(target)
        assert target.blocks_used == 0
        assert target.blocks_cached + target.blocks_free == 64
    assert target.ledger.index is not None
    assert target.ledger.index.evicted > 0


def test_without_contents_nothing_is_shared() -> None:
    target = scheduler()
    assert cached_of(target, id=1, prompt_len=64) == 0
    assert cached_of(target, id=2, prompt_len=64) == 0
    assert target.blocks_cached == 0


def test_the_record_tells_nothing_twice_of_what_the_cache_gave() -> None:
    target = scheduler()
    target.add(spec(1, tokens=range(40)))
    target.add(spec(2, tokens=range(40)))
    target.schedule(0.0)
    parts = target.take_record_parts()
    assert (parts.admitted, parts.resident) == ([(1, 0), (2, 32)], [])
