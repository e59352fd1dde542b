"""The mutations: a small fault in one place, and the test that must notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Mutation:
    """Replace `old`, which occurs once in `path`, by `new`; then `test` (a pytest node id) must fail."""

    fault: str
    path: str
    old: str
    new: str
    test: str

    def apply(self, root: Path) -> None:
        """Put the fault into the tree at `root`. Raises ValueError when the code is not what it was written for."""
        file = root / self.path
        text = file.read_text(encoding="utf-8")
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.fault}: {self.path} has {self.old!r} {found} times instead of once")
        file.write_text(text.replace(self.old, self.new), encoding="utf-8")


CORE, ENGINE, FRONT = "daemon/kvyard/core", "daemon/kvyard/engine", "daemon/kvyard/front"

MUTATIONS = (
    Mutation(
        "a freed block is kept",
        f"{CORE}/loops.py",
        "            pool.counts[BARE] += 1\n",
        "            pool.counts[BARE] += block > 0\n",
        "tests/core/test_pool.py::test_bare_blocks_are_a_stack_and_the_tail_goes_first",
    ),
    Mutation(
        "host blocks of a cancelled sequence are kept",
        f"{CORE}/ledger.py",
        "            self.host.release(seq.host)\n            seq.host = ()",
        "            seq.host = ()",
        "tests/core/test_host_pool.py::test_leak_09_a_swapped_request_that_is_cancelled_gives_everything_back",
    ),
    Mutation(
        "an ended sequence and its view hold each other",
        f"{CORE}/ledger.py",
        "            seq.view = None  # the two hold each other, and the collector is off while anything runs\n",
        "",
        "tests/core/test_garbage.py::test_ended_sequences_leave_no_cycles",
    ),
    Mutation(
        "the seed of the row, not of the request",
        f"{ENGINE}/sampler.py",
        "uniform(self._seeds[slots[random]], generated[random])",
        "uniform(self._seeds[random], generated[random])",
        "tests/engine/test_sampler.py::test_invariance_03_rows_are_as_alone",
    ),
    Mutation(
        "off by one at a block edge: a decode takes its block a token early",
        f"{CORE}/loops.py",
        "        if total[row] > held:",
        "        if total[row] >= held:",
        "tests/core/test_core_rules.py::test_boundary_06_a_block_is_taken_by_the_token_that_needs_it",
    ),
    Mutation(
        "off by one at a block edge: a wholly cached prompt leaves nothing to compute",
        f"{CORE}/ledger.py",
        "range((seq.total - 1) // self.block_size)",
        "range(seq.total // self.block_size)",
        "tests/core/test_prefix.py::test_prefix_07_and_08_all_full_blocks_but_one_token_stays_to_compute",
    ),
    Mutation(
        "a stop string's beginning is flushed early",
        f"{FRONT}/text/stops.py",
        "        cut = len(whole) - node.depth",
        "        cut = len(whole)",
        "tests/front/text/test_stops.py::test_TEXT_05_inside_a_token_and_across_tokens",
    ),
    Mutation(
        "min_tokens off by one: an end is held back a token too long",
        f"{ENGINE}/sampler.py",
        "if generated[row] < state.sampling.min_tokens:",
        "if generated[row] <= state.sampling.min_tokens:",
        "tests/engine/test_sampler.py::test_min_tokens_holds_back_every_end_and_the_requests_own_stops",
    ),
    Mutation(
        "min_tokens off by one: a stop string counts a token too early",
        f"{FRONT}/text/continuation.py",
        "ends=self.count >= self._min_tokens",
        "ends=self.count + 1 >= self._min_tokens",
        "tests/front/text/test_continuation.py::test_min_tokens_holds_stop_strings_back",
    ),
    Mutation(
        "penalties are lost when a sequence comes back",
        f"{ENGINE}/sampler.py",
        "Penalties(sampling, prompt, emitted) if",
        "Penalties(sampling, prompt, emitted[:0]) if",
        "tests/engine/test_sampler.py::test_a_sequence_that_comes_back_goes_on_as_if_nothing_had_been",
    ),
    Mutation(
        "a preempted sequence is requeued at the tail",
        f"{CORE}/queue.py",
        "seq.place = self._first = self._first - 1",
        "seq.place = self._last = self._last + 1",
        "tests/core/test_core_rules.py::test_preempt_06_a_preempted_one_comes_before_later_ones_of_its_priority",
    ),
    Mutation(
        "a block's digest forgets its parent",
        f"{CORE}/prefix.py",
        "block.update(parent + tokens[",
        "block.update(root + tokens[",
        "tests/core/test_prefix.py::test_a_digest_covers_everything_before_it",
    ),
    Mutation(
        "what comes back from the host pool is read from the device",
        f"{ENGINE}/backends/cpu.py",
        '"in": (self._host, device)',
        '"in": (device, device)',
        "tests/e2e/test_proof_equality.py::test_two_hundred_requests_of_a_small_model_equal_their_solo_runs",
    ),
    Mutation(
        "log-probabilities of the wrong row",
        f"{ENGINE}/sampler.py",
        "token_logprobs(logits[torch.from_numpy(asked)],",
        "token_logprobs(logits[: len(asked)],",
        "tests/engine/test_sampler.py::test_logprobs_are_the_models_own_for_those_that_ask",
    ),
    Mutation(
        "the usage counts a block too many as cached",
        f"{CORE}/intake.py",
        "min(len(offer.hits) * ledger.block_size, seq.prompt_len)",
        "min((len(offer.hits) + 1) * ledger.block_size, seq.prompt_len)",
        "tests/core/test_prefix.py::test_prefix_07_and_08_all_full_blocks_but_one_token_stays_to_compute",
    ),
    Mutation(
        "an incomplete character is flushed",
        f"{FRONT}/text/detokenizer.py",
        "return self._decoder.decode(self._bytes_of(token))",
        "return self._decoder.decode(self._bytes_of(token), True)",
        "tests/front/text/test_detokenizer.py::test_TEXT_02_a_long_run_of_byte_tokens_stays_whole",
    ),
    Mutation(
        "a victim that was placed already stays in the plan",
        f"{CORE}/planner.py",
        "        if step.preempted:  # a victim",
        "        if False:  # a victim",
        "tests/e2e/test_pool_cases.py::test_PREEMPT_08_nobody_who_gave_way_is_in_the_plan",
    ),
    Mutation(
        "digests are the same with every start",
        f"{ENGINE}/process.py",
        "salt=secrets.token_bytes(16)",
        "salt=bytes(16)",
        "tests/e2e/test_pool_cases.py::test_PREFIX_02_digests_are_long_and_new_with_every_start",
    ),
    Mutation(
        "the control socket is open to all for a moment",
        f"{FRONT}/control/listener.py",
        "mask = os.umask(0o177)",
        "mask = os.umask(0)",
        "tests/e2e/test_pool_cases.py::test_LIFECYCLE_08_the_socket_is_never_open_to_others_under_a_loose_umask",
    ),
    Mutation(
        "the guard's own trace function counts as the policy's",
        f"{CORE}/timed.py",
        "        containment.active = False  # a policy may not do this\n",
        "",
        "tests/engine/test_containment.py::test_ending_code_that_catches_everything_is_no_tampering",
    ),
    Mutation(
        "the collector's own work counts as that of finalizers",
        f"{CORE}/remains.py",
        "self.cpu_ns += min(now[0] - self._last[0], self._tick_ns)",
        "self.cpu_ns += now[0] - self._last[0]",
        "tests/core/test_guard_remains.py::test_time_between_two_samples_counts_as_one_interval_at_most",
    ),
    Mutation(
        "a policy that left ends outside the guard",
        f"{CORE}/guard.py",
        "            self.remains.leave(kind, known[0])\n",
        "            pass\n",
        "tests/core/test_guard_remains.py::test_who_is_held_elsewhere_is_kept_for_a_while",
    ),
    Mutation(
        "what a failed candidate's frames hold ends outside the guard",
        f"{CORE}/guard.py",
        "            self.protected(partial(clear_frames, failed[0]))\n",
        "",
        "tests/core/test_guard_remains.py::test_what_a_candidate_that_failed_leaves_ends_within_the_guard",
    ),
    Mutation(
        "parameters are set as if the policy were kvyard's own",
        f"{CORE}/swap.py",
        'call(kind, policy, "set_params", plain_mapping, dict(values), by=setting)',
        'call(kind, setting, "set_params", plain_mapping, dict(values))',
        "tests/core/test_guard_containment.py::test_who_fails_while_its_parameters_are_set_is_put_out",
    ),
    Mutation(
        "of two kinds of tampering one stays",
        f"{ENGINE}/containment.py",
        "(self._timer.restore(), self._restore(), self._restore_modules())",
        "(self._timer.restore() or self._restore() or self._restore_modules(),)",
        "tests/engine/test_containment.py::test_tampering_of_several_kinds_is_put_right_and_named_together",
    ),
    Mutation(
        "putting one policy out asks the others for their declarations",
        f"{CORE}/advice.py",
        "self.read_traits(self.policies, gone))",
        "self.read_traits(self.policies, KINDS))",
        "tests/core/test_swap.py::test_putting_one_out_asks_nothing_of_the_others",
    ),
)
