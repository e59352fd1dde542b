"""The waiting queue: order by arrival or key, joins and leaves at any length, a new order built beside."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvyard.core.guard import Fault
from kvyard.core.queue import AT_ONCE, BUCKET, KeysOf, SortedEntries, WaitingQueue
from kvyard.core.sequence import SequenceState
from kvyard.policy.base import OrderKey

from tests.core.harness import spec


def sequence(id: int, priority: int = 0) -> SequenceState:
    return SequenceState(spec(id, priority=priority), None)


def by_priority(seqs: Sequence[SequenceState]) -> list[OrderKey]:
    return [(seq.priority,) for seq in seqs]


def newest_first(seqs: Sequence[SequenceState]) -> list[OrderKey]:
    return [(-seq.arrival,) for seq in seqs]


def ids(queue: WaitingQueue) -> list[int]:
    return [seq.id for seq in queue]


def test_without_a_key_it_is_a_line_with_two_ends() -> None:
    queue = WaitingQueue()
    one, two, three = (sequence(id) for id in (1, 2, 3))
    for seq in (one, two):
        queue.arrive(seq)
    queue.requeue(three, front=True)
    assert ids(queue) == [3, 1, 2]
    queue.remove(one)
    queue.requeue(one, front=False)
    assert ids(queue) == [3, 2, 1]
    assert not queue.keyed


def test_a_key_orders_and_arrival_breaks_ties() -> None:
    queue = WaitingQueue(by_priority)
    for id, priority in ((1, 5), (2, 0), (3, 5), (4, 0)):
        queue.arrive(sequence(id, priority))
    assert ids(queue) == [1, 2, 3, 4], "not yet asked for their keys, but there"
    assert len(queue) == 4
    queue.settle()
    assert ids(queue) == [2, 4, 1, 3]
    assert queue.unsettled == 0
    late = sequence(0, 5)
    queue.requeue(late, front=False)
    assert ids(queue) == [2, 4, 0, 1, 3], "a key overrules front and tail"


def test_one_that_leaves_before_it_is_settled() -> None:
    queue = WaitingQueue(by_priority)
    seq = sequence(1)
    queue.arrive(seq)
    queue.remove(seq)
    assert (len(queue), ids(queue)) == (0, [])
    with pytest.raises(KeyError):
        queue.remove(seq)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), count=st.sampled_from((5, 40, 3 * BUCKET)))
def test_sorted_entries_stay_sorted(seed: int, count: int) -> None:
    random = Random(seed)
    entries = SortedEntries()
    there: list[tuple[OrderKey, int, SequenceState]] = []
    ids = list(range(count))
    if seed % 2:  # who was preempted comes back behind those that arrived later
        random.shuffle(ids)
    for id in ids:
        rank: OrderKey = (float(random.randrange(5)),)
        seq = sequence(id)
        entries.add(rank, seq)
        there.append((rank, id, seq))
        if random.random() < 0.4:
            rank, _, seq = there.pop(random.randrange(len(there)))
            entries.remove(rank, seq)
            with pytest.raises(KeyError):
                entries.remove(rank, seq)
    assert list(entries) == [seq for _, _, seq in sorted(there, key=lambda entry: entry[:2])]
    assert len(entries) == len(there)


def test_a_new_order_is_built_beside_while_the_old_one_serves() -> None:
    queue = WaitingQueue(by_priority)
    seqs = {id: sequence(id, id % 3) for id in range(1, 31)}
    for seq in seqs.values():
        queue.arrive(seq)
    queue.settle()
    before = ids(queue)
    built = queue.reorder(newest_first)
    built.advance(10)
    assert ids(queue) == before
    assert not built.complete
    with pytest.raises(RuntimeError, match="not complete"):
        queue.adopt(built)
    # In the meantime one it knows and one it does not know leave, one comes, and one comes back.
    queue.remove(seqs[int(before[0])])
    queue.remove(seqs[int(before[-1])])
    queue.arrive(sequence(99, 0))
    queue.settle()
    queue.requeue(seqs[int(before[0])], front=True)
    while not built.complete:
        built.advance(7)
    queue.adopt(built)
    expected = sorted([*before[:-1], 99], reverse=True)
    assert ids(queue) == expected
    for id in expected[:5]:
        queue.remove(seqs.get(id) or next(seq for seq in queue if seq.id == id))
    assert ids(queue) == expected[5:]


def test_back_to_the_order_of_arrival() -> None:
    queue = WaitingQueue(newest_first)
    for id in (1, 2, 3):
        queue.arrive(sequence(id))
    queue.settle()
    assert ids(queue) == [3, 2, 1]
    built = queue.reorder(None)
    built.advance(3)
    queue.adopt(built)
    assert ids(queue) == [1, 2, 3]
    assert not queue.keyed


def test_the_order_of_arrival_is_kept_under_a_key_with_both_its_ends() -> None:
    queue = WaitingQueue()
    seqs = {id: sequence(id) for id in range(1, 7)}
    for id in (1, 2, 3, 4):
        queue.arrive(seqs[id])
    queue.remove(seqs[3])
    queue.requeue(seqs[3], front=True)
    for order in (newest_first, by_priority):
        built = queue.reorder(order)
        built.advance(100)
        queue.adopt(built)
    queue.remove(seqs[1])
    queue.requeue(seqs[1], front=False)
    queue.remove(seqs[4])
    queue.requeue(seqs[4], front=True)
    queue.arrive(seqs[5])
    queue.settle()
    built = queue.reorder(None)
    built.advance(100)
    queue.adopt(built)
    assert ids(queue) == [4, 3, 2, 1, 5]


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_while_a_new_order_is_built(seed: int) -> None:
    """Against a plain list: joins, leaves and returns at both ends, between and during changes of the order."""
    random, queue, line = Random(seed), WaitingQueue(), list[SequenceState]()
    outside = [sequence(id, random.randrange(4)) for id in range(30)]
    order: object = None
    for _ in range(150):
        action, built = random.random(), queue.reordering
        if action < 0.35 and outside:
            seq = outside.pop(random.randrange(len(outside)))
            front = random.random() < 0.3
            if front or random.random() < 0.5:
                queue.requeue(seq, front=front)
            else:
                queue.arrive(seq)
            line.insert(0 if front else len(line), seq)
        elif action < 0.65 and line:
            seq = line.pop(random.randrange(len(line)))
            queue.remove(seq)
            outside.append(seq)
        elif built is None:
            queue.settle()
            queue.reorder(random.choice((None, by_priority, newest_first)))
        elif random.random() < 0.1:
            queue.abandon_reorder()
        else:
            queue.settle()
            built.advance(random.randrange(1, 5))
            if built.complete:
                queue.adopt(built)
                order = built.keys_of
        queue.settle()
        expected = line
        if order is by_priority:
            expected = sorted(line, key=lambda seq: (seq.priority, seq.arrival))
        elif order is newest_first:
            expected = sorted(line, key=lambda seq: -seq.arrival)
        assert list(queue) == expected
        assert len(queue) == len(line)


def test_a_candidate_whose_key_fails_harms_nobody() -> None:
    def failing(seqs: Sequence[SequenceState]) -> list[OrderKey]:
        if any(seq.id == 3 for seq in seqs):
            raise Fault("admission", "raised", "no")
        return [(seq.id,) for seq in seqs]

    queue = WaitingQueue(by_priority)
    for id in (1, 2, 3, 4):
        queue.arrive(sequence(id))
    queue.settle()
    built = queue.reorder(failing)
    built.advance(100)
    assert built.fault is not None
    assert not built.complete
    queue.arrive(sequence(5))
    queue.settle()
    queue.abandon_reorder()
    assert queue.reordering is None
    assert ids(queue) == [1, 2, 3, 4, 5]


def test_keys_are_asked_for_many_at_once_and_never_too_many() -> None:
    asked: list[int] = []

    def counting(seqs: Sequence[SequenceState]) -> list[OrderKey]:
        asked.append(len(seqs))
        return by_priority(seqs)

    queue = WaitingQueue(counting)
    for id in range(AT_ONCE + 5):
        queue.arrive(sequence(id, -id))
    queue.settle()
    assert asked == [AT_ONCE, 5]
    assert ids(queue) == list(reversed(range(AT_ONCE + 5)))


def test_a_key_that_fails_loses_nobody_who_arrived() -> None:
    broken = True

    def failing(seqs: Sequence[SequenceState]) -> list[OrderKey]:
        if broken:
            raise Fault("admission", "raised", "no")
        return by_priority(seqs)

    queue = WaitingQueue(failing)
    for id in (1, 2, 3):
        queue.arrive(sequence(id))
    with pytest.raises(Fault):
        queue.settle()
    assert (len(queue), queue.unsettled) == (3, 3)
    broken = False
    queue.settle()
    assert ids(queue) == [1, 2, 3]


def test_joining_and_leaving_cost_the_same_in_a_long_queue() -> None:
    queue = WaitingQueue(by_priority)
    seqs = [sequence(id, id % 10) for id in range(20_000)]
    for seq in seqs:
        queue.arrive(seq)
    queue.settle()
    assert max(len(bucket) for bucket in queue._entries._seqs) <= BUCKET
    for seq in seqs[::2]:
        queue.remove(seq)
    assert len(queue) == 10_000
    assert all(queue._entries._seqs), "empty buckets go"
    assert [*map(len, queue._entries._ranks)] == [*map(len, queue._entries._seqs)]


@pytest.mark.parametrize("keys_of", [None, by_priority, lambda seqs: [float(seq.arrival) for seq in seqs]])
def test_who_does_not_wait_cannot_be_taken_out(keys_of: KeysOf | None) -> None:
    queue = WaitingQueue(keys_of)
    for id in (1, 2, 3):
        queue.arrive(sequence(id))
    queue.settle()
    with pytest.raises(KeyError):
        queue.remove(sequence(7))
    assert ids(queue) == [1, 2, 3]


def test_places_count_upwards_whatever_the_arrival_numbers_are() -> None:
    queue = WaitingQueue()
    seqs = [sequence(id) for id in (7, 8, 3, 9, 9_000, 4)]
    for seq in seqs[:2]:
        queue.arrive(seq)
    queue.remove(seqs[0])
    queue.requeue(seqs[0], front=False)
    for seq in seqs[2:]:
        queue.arrive(seq)
    assert [seq.place for seq in seqs] == [9, 8, 10, 11, 9_000, 9_001]
    assert ids(queue) == [8, 7, 3, 9, 9_000, 4]
