"""What the policies decide, on the real scheduler in virtual time: no daemon and no model needed."""

from kvyard.core.plan import Limits, SequenceSpec
from kvyard.core.scheduler import PolicySet, Scheduler
from kvyard_example.admission import ShortestFirst
from kvyard_example.preemption import MostBlocks
from kvyard_example.prefill import PromptShare


def scheduler(**params: float) -> Scheduler:
    limits = Limits(blocks=16, block_size=4, max_running=2, max_step_tokens=32, max_model_len=64)
    return Scheduler(limits, PolicySet(ShortestFirst(**params), MostBlocks(), PromptShare()), clock_ns=lambda: 0)


def submit(core: Scheduler, *lengths: int) -> None:
    for number, length in enumerate(lengths, 1):
        core.add(SequenceSpec(number, number, number, float(number), length, max_new=4))


def test_the_shortest_prompt_comes_first() -> None:
    core = scheduler(patience=0.0)
    submit(core, 20, 3, 5)
    assert core.schedule(0.0).ids.tolist() == [2, 3]


def test_patience_wins_over_length() -> None:
    core = scheduler(patience=1000.0)
    submit(core, 8, 3, 5)
    assert core.schedule(0.0).ids.tolist()[0] == 1


def test_prompts_take_their_share_of_the_step() -> None:
    core = scheduler()
    submit(core, 30, 30)
    assert core.schedule(0.0).granted.sum() == 8
