"""Messages between front and engine (docs/architecture.md): msgpack arrays over a socketpair.

Columns travel as raw little-endian bytes (`int64` ids, `int32` tokens, `uint64` hashes), because a
step of a thousand sequences must not cost a thousand Python objects on each side. Times are seconds on
CLOCK_MONOTONIC, which both processes share. A change of a message gets a line in CHANGELOG.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

PROTOCOL = 2
"""Version of the link; front and engine come from one installation, so a mismatch is refused."""

FinishReason = Literal["stop", "length", "cancelled", "error"]
Dtype = Literal["float32", "bfloat16"]
Device = Literal["cpu", "cuda"]


class Sampling(Struct, omit_defaults=True, frozen=True, gc=False):
    """How output tokens are chosen; ranges are checked by the front, so the engine may trust them.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 and `min_p` 0 are off. `seed` is always set: the
    front draws one for a request without. Token ids are within the vocabulary.
    """

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = -1
    """Alternatives per output token; 0 gives the chosen token's alone, -1 nothing."""
    prompt_logprobs: int = -1
    """The same for each prompt token but the first."""
    index: int = 0
    """0-based index of the sequence within its request: each draws numbers of its own."""


class Sequence(Struct, array_like=True, gc=False):
    """One generated continuation, whole enough to be started by any engine at any point of its life."""

    id: int
    """Unique over the life of the front, ascending in the order of arrival, the tie-breaker of every order."""
    request: int
    """The request it belongs to: the `id` of its first sequence; `n` > 1 makes several sequences of one request."""
    index: int
    """0-based index within its request."""
    arrived: float
    """Time of arrival at the front."""
    prompt: bytes
    """Prompt token ids, int32."""
    max_new: int
    """Most output tokens, those in `emitted` included."""
    sampling: bytes
    """A `Sampling` as `kvyard.link.codec` encodes it: what waits has no use for it, and long queues do wait."""
    emitted: bytes = b""
    """Output tokens already sent to the client, int32: a new engine goes on behind them."""
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    cache_salt: str = ""
    n: int = 1
    """Sequences of its request, which have the same prompt."""
    scored: bool = False
    """Log-probabilities of its prompt are asked for."""


# ---- front to engine ---------------------------------------------------------------------------------------


class Start(Struct, array_like=True, tag="start"):
    """First frame to a new engine; the progress page's descriptor travels with it (SCM_RIGHTS)."""

    protocol: int
    model_path: str
    device: Literal["auto", "cpu", "cuda"]
    dtype: Literal["auto", "float32", "bfloat16"]
    deterministic: bool
    kv_blocks: int | None
    """None sizes the pool from free memory."""
    block_size: int
    max_running: int
    max_step_tokens: int
    max_model_len: int | None
    """None takes the model's own limit."""
    prefix_cache: bool
    swap_blocks: int
    """Blocks of the host pool for preemption by swap; 0 makes every preemption a recompute."""
    discipline: str
    policies: dict[str, tuple[str, dict[str, Any]]]
    """Per kind, name and parameters that replace the discipline's own part; under `discipline`, parameters by kind
    that an operator gave with it."""
    quarantined: list[str]
    """Policies (`kind/name`) that may not be loaded."""
    generation: int
    """Number of policy changes so far, so that it never goes back over a restart."""
    policy_state: dict[str, Any] = {}
    """Last exported state per `kind/name`."""
    prefix_cache_isolation: Literal["none", "tenant"] = "tenant"
    """Who shares prefixes: everybody, or the requests of one tenant."""
    again: bool = False
    """An engine has served before: this one must come up, with built-in policies where others cannot be used."""


class Submit(Struct, array_like=True, tag="submit"):
    """Take up a sequence. Answered by `Outputs` in time, or by `Failed`."""

    sequence: Sequence


class Cancel(Struct, array_like=True, tag="cancel"):
    """Forget these sequences and free their blocks at the next step boundary; unknown ids are ignored."""

    ids: list[int]


class Control(Struct, array_like=True, tag="control"):
    """An operator's action at the step boundary, answered by `Reply` with the same ticket.

    Methods: `policies` (what is in force), `swap` {kind|discipline, name, params, who}, `set` {kind,
    params, who}, `pause`, `resume`, `dump`, `release` {policy}, `places` {max_running}.
    """

    ticket: int
    method: str
    params: dict[str, Any] = {}


class Stop(Struct, array_like=True, tag="stop"):
    """Leave now; sequences still running are dropped (the front has drained or is forced)."""


# ---- engine to front ---------------------------------------------------------------------------------------


class Loading(Struct, array_like=True, tag="loading"):
    """Progress of the start, for the log and for `/ready`'s reason."""

    what: str
    fraction: float = 0.0


class EngineInfo(Struct, array_like=True, tag="ready"):
    """The engine serves from now on; what it really runs with."""

    pid: int
    backend: Device
    device: str
    """In words: the CPU's or the card's name."""
    dtype: Dtype
    deterministic: bool
    kv_blocks: int
    block_size: int
    kv_bytes: int
    """Bytes of the KV pool."""
    max_running: int
    max_step_tokens: int
    max_model_len: int
    """Tokens a sequence may hold, prompt and output; never more than the pool can."""
    vocab_size: int
    eos_ids: list[int]
    policies: dict[str, str]
    """Kind to the name in charge."""
    generation: int
    notes: list[str] = []
    """What could not be used as asked, in sentences; the built-in policies are in charge there."""


class Refused(Struct, array_like=True, tag="refused"):
    """The engine cannot start: what happened, what it means, what to do. It exits after this."""

    code: str
    message: str
    hint: str = ""


class TokenLogprobs(Struct, array_like=True):
    """Log-probabilities of one position: of the chosen token and of the best alternatives."""

    token: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]] = []


class Outputs(Struct, array_like=True, tag="outputs"):
    """What one step produced, one row per sampled sequence."""

    step: int
    at: float
    ids: bytes
    """int64, the sequences' ids."""
    tokens: bytes
    """int32, one output token each."""
    hashes: bytes = b""
    """uint64, one hash of each row's logits; empty outside deterministic mode."""
    logprobs: dict[int, TokenLogprobs] = {}
    """By sequence id, for those that asked."""
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
    """By sequence id, whole, with the first output token of those that asked."""
    finished: list[tuple[int, FinishReason]] = []
    """Sequences that ended in this step, after their row above."""
    admitted: list[tuple[int, float, int]] = []
    """First admissions in this step: id, time, prompt tokens found in the prefix cache."""


class Failed(Struct, array_like=True, tag="failed"):
    """One sequence ended by an error; its client is told."""

    id: int
    code: str
    message: str


class Ejected(Struct, array_like=True, tag="ejected"):
    """A policy was put out; where it was in charge, the built-in of its kind took over in the same step."""

    policy: str
    """`kind/name`."""
    code: str
    """Machine-readable cause, for example `raised`, `nonsense`, `too-slow`."""
    message: str
    step: int
    traceback: str = ""
    snapshot: dict[str, Any] = {}
    dump: dict[str, Any] = {}
    exported: dict[str, Any] = {}
    with_it: list[str] = []
    """`kind/name` of the other parts of its discipline, which went with it and are not to blame."""
    decisions: list[dict[str, Any]] = []
    """The last decisions of its kind, oldest first: `step`, `call`, `answer`."""
    version: str = ""
    """Of the distribution it came from, empty where it is not known."""
    in_charge: bool = True
    """False when it had left before: then nothing took over from it."""


class PolicyState(Struct, array_like=True, tag="policy-state"):
    """Exported state of the policies in charge, every few seconds, so that it outlives the engine."""

    state: dict[str, Any]


class Reply(Struct, array_like=True, tag="reply"):
    """Answer to a `Control`; `error` is None when it was done.

    A refusal may say in `result` what it is about: one with code `quarantined` has `policy` (`kind/name`).
    """

    ticket: int
    result: dict[str, Any] = {}
    error: str | None = None
    code: str = ""


class Goodbye(Struct, array_like=True, tag="goodbye"):
    """The last frame of an engine that leaves by itself."""

    reason: str
    details: dict[str, Any] = field(default_factory=dict)
