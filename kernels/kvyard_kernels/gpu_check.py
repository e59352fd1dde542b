"""The kernels' part of the check on a GPU: numerics against float64, repeatability, bandwidth of decode attention.

Called by the engine's `gpu_check`, which adds the model's part and writes the report. With `dry` everything runs at
small sizes, under the interpreter too, and times mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvyard_kernels import reference
from kvyard_kernels.cases import PagedCase, PagedShape, paged_case
from kvyard_kernels.triton import ops
from kvyard_kernels.triton.worklists import decode_splits, query_tiles, tile_span

LIMITS = {torch.float32: 5e-5, torch.bfloat16: 2e-2}
"""Largest difference from float64 in a row, relative to the row's largest value: the answer over a long context is
an average of many values, and small, so that an error there would hide behind short ones."""


@dataclass(frozen=True, slots=True)
class Numeric:
    """One comparison with the float64 answer."""

    name: str
    dtype: str
    error: float
    """See `LIMITS`; NaN where the kernel gave NaN."""
    limit: float

    @property
    def passed(self) -> bool:
        """NaN does not pass."""
        return self.error <= self.limit


@dataclass(frozen=True, slots=True)
class Repeat:
    """Bits compared between launches that must agree."""

    name: str
    launches: int
    differing: int


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Decode attention beside a device copy of as many bytes, in the same run."""

    name: str
    gigabytes: float
    """Keys and values that the kernel must read."""
    microseconds: float
    gb_per_s: float
    copy_gb_per_s: float
    """Of a device copy, bytes read and written counted."""

    @property
    def ratio(self) -> float:
        """Of the kernel's rate to the copy's."""
        return self.gb_per_s / self.copy_gb_per_s


def _error(found: Tensor, expected: Tensor) -> float:
    difference = (found.double().cpu() - expected).abs().amax(-1)
    return float((difference / expected.abs().amax(-1).clamp_min(1e-6)).max())


# ---- numerics


def decode(case: PagedCase, rows: slice = slice(None)) -> Tensor:
    """The decode kernel on some rows of a problem."""
    window = case.shape.window
    splits = decode_splits(case.shape.lengths[rows], window, case.q.device)
    return ops.paged_decode(
        case.q[rows], case.k_cache, case.v_cache, case.tables[rows], case.lengths[rows], splits, scale=case.scale,
        window=window,
    )  # fmt: skip


def mixed(case: PagedCase) -> Tensor:
    """The kernel for chunks on a whole problem."""
    tiles = query_tiles(case.starts.tolist(), tile_span(case.shape.heads, case.k_cache), case.q.device)
    return ops.paged_mixed(
        case.q, case.k_cache, case.v_cache, case.tables, case.starts, case.lengths, tiles, scale=case.scale,
        window=case.shape.window,
    )  # fmt: skip


HEADS = {"135m": (9, 3, 64), "8b": (32, 8, 128), "gemma": (4, 1, 256)}
SMALL_HEADS = {"135m": (3, 1, 64), "8b": (4, 2, 128)}


def numerics(device: torch.device, *, dry: bool) -> Iterator[Numeric]:
    """Every kernel in both types; NaN in all slots that nobody owns, fused queries, odd lengths, a window."""
    for dtype in LIMITS:
        yield from _attention_numerics(device, dtype, dry)
        yield from _row_numerics(device, dtype, 17 if dry else 4099)
    yield from _choice_numerics(device, 5_000 if dry else 151_936)


def _attention_numerics(device: torch.device, dtype: torch.dtype, dry: bool) -> Iterator[Numeric]:
    contexts = (1, 33, 0, 300) if dry else (1, 15, 33, 0, 1001, 4096, 8191)
    chunks = ((40, 5, 33), (23, 1, 33)) if dry else ((40, 5, 1001, 2048, 700), (23, 1, 512, 2048, 1))
    for name, (heads, kv_heads, head_dim) in (SMALL_HEADS if dry else HEADS).items():
        for window in (0, 100):
            shape = PagedShape(
                contexts, (1,) * len(contexts), heads, kv_heads, head_dim, dtype=dtype, window=window, fused=True,
                heads_first=True,
            )  # fmt: skip
            case = paged_case(shape, device=device)
            yield _numeric(f"decode {name} window={window}", dtype, decode(case), case.expected())
            lengths, counts = chunks
            shape = PagedShape(lengths, counts, heads, kv_heads, head_dim, dtype=dtype, window=window)
            case = paged_case(shape, device=device)
            yield _numeric(f"chunks {name} window={window}", dtype, mixed(case), case.expected())


def _numeric(name: str, dtype: torch.dtype, found: Tensor, expected: Tensor) -> Numeric:
    return Numeric(name, str(dtype).removeprefix("torch."), _error(found, expected), LIMITS[dtype])


def _random(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def _row_numerics(device: torch.device, dtype: torch.dtype, rows: int) -> Iterator[Numeric]:
    x, weight = _random(device, dtype, rows, 576), _random(device, torch.float32, 576, seed=1)
    residual = _random(device, torch.float32, rows, 576, seed=2)
    total = residual.double().cpu() + x.double().cpu()
    wide = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double().cpu()
    yield _numeric("rms_norm", dtype, ops.rms_norm(x, weight, 1e-5, residual=residual), wide)
    gate, up = _random(device, dtype, rows, 1536), _random(device, dtype, rows, 1536, seed=1)
    expected = torch.nn.functional.silu(gate.double()).cpu() * up.double().cpu()
    yield _numeric("swiglu", dtype, ops.gated(gate, up), expected)
    yield from _cache_numerics(device, dtype, rows)


def _cache_numerics(device: torch.device, dtype: torch.dtype, rows: int) -> Iterator[Numeric]:
    heads, kv_heads, head_dim, block_size = 9, 3, 64, 16
    product = _random(device, dtype, rows, (heads + 2 * kv_heads) * head_dim).view(rows, -1, head_dim)
    q, k, v = product.tensor_split((heads, heads + kv_heads), dim=1)
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * reference.inverse_frequencies(head_dim, 1e4)
    expected_q, expected_k = (_turned(x.double().cpu(), angles) for x in (q, k))
    pool = torch.zeros((2, -(-rows // block_size), block_size, kv_heads, head_dim), dtype=dtype, device=device)
    slots = torch.randperm(pool.shape[1] * block_size, generator=torch.Generator().manual_seed(3))[:rows].to(device)
    values = v.double().cpu()
    cos, sin = angles.cos().float().to(device), angles.sin().float().to(device)
    positions = torch.arange(rows, dtype=torch.int32, device=device)
    ops.rope_and_cache(q, k, v, pool[0], pool[1], positions, cos, sin, slots)
    yield _numeric("rope of q", dtype, q, expected_q)
    yield _numeric("rope of k, through the cache", dtype, pool[0].flatten(0, 1)[slots], expected_k)
    yield _numeric("v through the cache", dtype, pool[1].flatten(0, 1)[slots], values)


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """float64 rotation of the pairs (i, i + half)."""
    half = angles.shape[1]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _choice_numerics(device: torch.device, vocab: int) -> Iterator[Numeric]:
    logits = _random(device, torch.float32, 8, vocab)
    wrong = (ops.argmax(logits).cpu() != logits.cpu().argmax(-1)).sum()
    yield Numeric("argmax, rows that differ", "float32", float(wrong), 0.0)
    weights = logits.softmax(-1)
    u = torch.linspace(0.01, 0.99, 8, device=device)
    reached = weights.double().cpu().cumsum(-1)
    chosen = ops.draw(weights, u).cpu()[:, None]
    share = reached.gather(1, chosen) / reached[:, -1:]
    before = share - weights.double().cpu().gather(1, chosen) / reached[:, -1:]
    goal = u.double().cpu()[:, None]
    yield Numeric("draw, distance of u", "float32", float(torch.maximum(before - goal, goal - share).max()), 1e-5)


# ---- repeatability


def repeats(device: torch.device, *, dry: bool) -> Iterator[Repeat]:
    """The same call again and again with other kernels in between, and each row alone: equal bits."""
    launches = 3 if dry else 100
    contexts = (17, 300, 600) if dry else (17, 256, 257, 1000, 4096)
    for dtype in LIMITS:
        shape = PagedShape(contexts, (1,) * len(contexts), 32, 8, 128, dtype=dtype)
        if dry:
            shape = PagedShape(contexts, (1,) * len(contexts), dtype=dtype)
        case = paged_case(shape, device=device)
        together = decode(case)
        other = _random(device, dtype, 64, 512)
        differing = 0
        for _ in range(launches):
            ops.gated(other, other)
            differing += not torch.equal(decode(case), together)
        name = str(dtype).removeprefix("torch.")
        yield Repeat(f"decode {name}, repeated", launches, differing)
        alone = [not torch.equal(decode(case, slice(i, i + 1))[0], together[i]) for i in range(len(contexts))]
        yield Repeat(f"decode {name}, each row alone", len(contexts), sum(alone))


# ---- bandwidth


@dataclass(frozen=True, slots=True)
class _Load:
    name: str
    rows: int
    context: int
    heads: tuple[int, int, int]


def bandwidth(device: torch.device, *, dry: bool) -> Iterator[Bandwidth]:
    """bfloat16 decode attention over contexts that no cache holds, against a copy on the same device."""
    loads = [
        _Load("8b, 64 rows of 4096", 64, 4096, HEADS["8b"]),
        _Load("8b, 8 rows of 16384", 8, 16384, HEADS["8b"]),
        _Load("8b, 1 row of 65536", 1, 65536, HEADS["8b"]),
        _Load("135m, 256 rows of 4096", 256, 4096, HEADS["135m"]),
        _Load("135m, 32 rows of 1024", 32, 1024, HEADS["135m"]),
    ]
    if dry:
        loads = [_Load("small, 2 rows of 300", 2, 300, (4, 2, 16))]
    rate = copy_rate(device, 1 << 16 if dry else 1 << 30)
    for load in loads:
        yield _bandwidth(device, load, rate, dry)


def copy_rate(device: torch.device, size: int) -> float:
    """GB/s of a device copy of `size` bytes, bytes read and bytes written both counted."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = timed(lambda: target.copy_(source), device)
    return 2 * size / seconds / 1e9


def _bandwidth(device: torch.device, load: _Load, rate: float, dry: bool) -> Bandwidth:
    heads, kv_heads, head_dim = load.heads
    blocks = -(-load.context // 16)
    shape = (load.rows * blocks, 2, kv_heads, 16, head_dim)
    pool = torch.randn(shape, dtype=torch.bfloat16, device=device).transpose(2, 3)
    q = torch.randn((load.rows, heads, head_dim), dtype=torch.bfloat16, device=device)
    tables = torch.randperm(load.rows * blocks, device=device).to(torch.int32).view(load.rows, blocks)
    lengths = torch.full((load.rows,), load.context, dtype=torch.int32, device=device)
    splits = decode_splits([load.context] * load.rows, 0, device)
    out = torch.empty_like(q)

    def launch() -> None:
        ops.paged_decode(q, pool[:, 0], pool[:, 1], tables, lengths, splits, scale=head_dim**-0.5, out=out)

    seconds = timed(launch, device, repeats=2 if dry else 30)
    size = 2 * load.rows * load.context * kv_heads * head_dim * 2
    return Bandwidth(load.name, size / 1e9, seconds * 1e6, size / seconds / 1e9, rate)


def timed(call: Callable[[], object], device: torch.device, *, repeats: int = 20) -> float:
    """Median seconds of a call, by events on a GPU; three calls come first to compile and to warm up."""
    for _ in range(3):
        call()
    if device.type != "cuda":
        return _median([_clocked(call) for _ in range(repeats)])
    torch.cuda.synchronize(device)
    pairs = []
    for _ in range(repeats):
        begin, end = _event(), _event()
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize(device)
    return _median([begin.elapsed_time(end) / 1e3 for begin, end in pairs])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch leaves it out


def _clocked(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return max(time.perf_counter() - begin, 1e-9)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
