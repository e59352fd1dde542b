"""What the core hands to the engine each step, and what it gets back (docs/architecture.md).

Arrays are columns: one row per running sequence, addressed by its slot. `tables` and `tokens` are live
views of the core's own arrays, valid until the next call of the core; nobody else writes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
Tokens = TokenArray | bytes
"""Token ids as an array, or as the bytes of one: then nothing is made of them before their turn comes."""


def token_array(tokens: Tokens) -> TokenArray:
    """These tokens as an array, not to be written to."""
    return np.frombuffer(tokens, np.int32) if isinstance(tokens, bytes) else tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """The three separate limits and the pool's geometry."""

    blocks: int
    block_size: int
    max_running: int
    max_step_tokens: int
    max_model_len: int
    """Tokens a sequence may hold, prompt and output."""
    prefix_cache: bool = False
    swap_blocks: int = 0
    """Blocks of the host pool."""
    isolate_tenants: bool = True
    """A prefix is shared within its tenant alone."""


@dataclass(slots=True)
class SequenceSpec:
    """A sequence as the core takes it up."""

    id: int
    request: int
    arrival: int
    arrived: float
    prompt_len: int
    max_new: int
    prompt: Tokens | None = None
    """None in the simulator, where only lengths count."""
    emitted: TokenArray | None = None
    """Output tokens already sent: they are recomputed as part of the prompt, and count as generated."""
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    cache_salt: str = ""
    siblings: bool = False
    """Others of its request have the same prompt and come too (n > 1)."""
    scored: bool = False
    """Every position of its prompt is wanted, so until its first output token none may come from the prefix cache."""
    attached: bytes = b""
    """Whatever it needs in a row beside its tokens: handed back each time it comes in, and not looked at."""


class Admitted(NamedTuple):
    """A sequence that came in: `slot` is its row until it leaves."""

    id: int
    slot: int
    cached: int
    """Prompt tokens found in the prefix cache."""
    resumed: bool
    """It ran before and was preempted; its sampler state goes on."""
    start: int = 0
    """Tokens whose KV is there: cached, taken over from a sequence of its request, or copied back."""
    prompt_len: int = 0
    attached: bytes = b""
    """As in its specification."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """KV to be copied before the step's model runs, in the order of the plan: all `out`, all `copy`, all `in`."""

    id: int
    direction: str
    """`out`: device to host; `in`: host to device; `copy`: device to device, see `kvyard.core.fork`."""
    source: IntArray
    target: IntArray


@dataclass(slots=True)
class Plan:
    """One step: who computes how many tokens. Order is the order of scheduling."""

    step: int
    ids: IntArray
    slots: IntArray
    granted: IntArray
    computed: IntArray
    """Tokens in KV before the step; the chunk is `tokens[slot, computed:computed + granted]`."""
    samples: BoolArray
    """Whose chunk reaches its last known token, so that the step yields an output token."""
    tables: TokenArray
    """`[slots, most blocks of a sequence]`, the block tables."""
    tokens: TokenArray
    """`[slots, max_model_len]`, prompt and output ids."""
    admitted: list[Admitted] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def idle(self) -> bool:
        """Nothing to do. Any other plan is executed, and committed or abandoned, even if it has no rows:

        a sequence may have come in without tokens, or may have to be copied out although nothing else runs.
        """
        return not (len(self.ids) or self.admitted or self.copies)


@dataclass(slots=True)
class Committed:
    """What the core did with a step's output tokens; rows are those with `samples`, in the plan's order."""

    ids: IntArray
    finished: list[tuple[int, str]]
    """Ids and reasons (`stop`, `length`)."""
