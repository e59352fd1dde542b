"""Row-wise CPU kernels: norm with residual, rope with cache write, gated activation. One row, one result.

Each reads and writes bfloat16 or float32 as its flags say and computes in float32, so a kernel is compiled
once for all types. A row never sees another, so results do not depend on the size of the step.

Where something is divided, numba's default of raising on zero is switched off: the test would keep the loop
from using vectors (measured: 6 us for a row of 1,536 gates with it, under 1 us without).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kvyard_kernels.cpu_math import exponential
from kvyard_kernels.cpu_memory import double_bits, f32, i64, narrow, take, u16, widen

NORM = ("counter", "lane", "rows", "width", "x", "x_bf16", "residual", "weight", "out", "out_bf16", "eps", "scratch",
        "scratch_stride", "batch")  # fmt: skip
GATE = ("counter", "lane", "rows", "width", "x", "x_bf16", "out", "gelu", "scratch", "scratch_stride", "batch")
ROPE = ("counter", "lane", "rows", "heads", "kv_heads", "width", "half", "qkv", "bf16", "cos", "sin", "slots", "keys",
        "values", "block_stride", "head_stride", "value_width", "block_size", "kv_bf16", "q_norm", "k_norm", "eps",
        "q_out", "scratch", "scratch_stride", "batch")  # fmt: skip
"""Names of each kernel's int64 parameters, in order. Threads draw `batch` rows at a time."""


@njit(fastmath={"reassoc", "contract"})
def _squares(row: int, width: int) -> float:
    values = f32(row, width)
    total = np.float32(0.0)
    for i in range(width):
        total += values[i] * values[i]
    return total


@njit(error_model="numpy")
def _normalise(source: int, weight: int, target: int, width: int, eps: float) -> None:
    scale = np.float32(1.0) / np.sqrt(_squares(source, width) / np.float32(width) + np.float32(eps))
    values, factors, out = f32(source, width), f32(weight, width), f32(target, width)
    for i in range(width):
        out[i] = values[i] * scale * factors[i]


def norm(p: int) -> None:
    """`residual += x` (where x is not 0), then `out = rms_norm(residual)`. Parameters: `NORM`."""
    a = i64(p, 14)
    rows, width, batch = a[2], a[3], a[13]
    scratch = a[11] + take(p + 8) * a[12]
    eps = double_bits(a[10])
    begin = take(p) * batch
    while begin < rows:
        for row in range(begin, min(rows, begin + batch)):
            residual = a[6] + row * width * 4
            if a[4]:
                widen(a[4] + row * width * (2 if a[5] else 4), scratch, width, a[5])
                stream, added = f32(residual, width), f32(scratch, width)
                for i in range(width):
                    stream[i] += added[i]
            _normalise(residual, a[7], scratch, width, eps)
            narrow(scratch, a[8] + row * width * (2 if a[9] else 4), width, a[9])
        begin = take(p) * batch


@njit(fastmath={"contract"}, error_model="numpy")
def _silu_times(gate: int, up: int, width: int) -> None:
    gates, ups = f32(gate, width), f32(up, width)
    for i in range(width):
        g = gates[i]
        gates[i] = g / (np.float32(1.0) + exponential(-g)) * ups[i]


@njit(fastmath={"contract"}, error_model="numpy")
def _gelu_times(gate: int, up: int, width: int) -> None:
    """tanh form: `0.5 g (1 + tanh z) = g / (1 + exp(-2 z))`, z = sqrt(2 / pi) (g + 0.044715 g^3)."""
    gates, ups = f32(gate, width), f32(up, width)
    twice = np.float32(-1.5957691216057308)
    for i in range(width):
        g = gates[i]
        z = twice * (g + np.float32(0.044715) * g * g * g)
        gates[i] = g / (np.float32(1.0) + exponential(z)) * ups[i]


def gate(p: int) -> None:
    """`out = activation(x[:, :width]) * x[:, width:]`. Parameters: `GATE`; x and out have one type."""
    a = i64(p, 11)
    rows, width, bf16, batch = a[2], a[3], a[5], a[10]
    scratch = a[8] + take(p + 8) * a[9]
    size = 2 if bf16 else 4
    begin = take(p) * batch
    while begin < rows:
        for row in range(begin, min(rows, begin + batch)):
            widen(a[4] + row * width * 2 * size, scratch, 2 * width, bf16)
            if a[7]:
                _gelu_times(scratch, scratch + width * 4, width)
            else:
                _silu_times(scratch, scratch + width * 4, width)
            narrow(scratch, a[6] + row * width * size, width, bf16)
        begin = take(p) * batch


@njit
def _rotate(head: int, cos: int, sin: int, half: int) -> None:
    values, c, s = f32(head, 2 * half), f32(cos, half), f32(sin, half)
    for i in range(half):
        x, y = values[i], values[half + i]
        values[i] = x * c[i] - y * s[i]
        values[half + i] = y * c[i] + x * s[i]


@njit
def _store_key(head: int, target: int, width: int, stride: int, bf16: int, spare: int) -> None:
    """One key into its column of a transposed block."""
    narrow(head, spare, width, bf16)
    if bf16:
        bits, column = u16(spare, width), u16(target, width * stride)
        for i in range(width):
            column[i * stride] = bits[i]
    else:
        values, cells = f32(spare, width), f32(target, width * stride)
        for i in range(width):
            cells[i * stride] = values[i]


def rope_and_cache(p: int) -> None:
    """Rotate queries and keys, write keys and values to the pool. Parameters: `ROPE`.

    Queries come out as float32 `[rows, heads, width]`. With `q_norm`/`k_norm` not 0 each head is normalised
    before it is turned (Qwen 3, Gemma 3).
    """
    a = i64(p, 26)
    rows, heads, kv_heads, width, half, bf16, batch = a[2], a[3], a[4], a[5], a[6], a[8], a[25]
    scratch = a[23] + take(p + 8) * a[24]
    size, kv_size = 2 if bf16 else 4, 2 if a[18] else 4
    all_heads = heads + 2 * kv_heads
    spare = scratch + all_heads * width * 4
    eps = double_bits(a[21])
    begin = take(p) * batch
    while begin < rows:
        for row in range(begin, min(rows, begin + batch)):
            widen(a[7] + row * all_heads * width * size, scratch, all_heads * width, bf16)
            cos, sin = a[9] + row * half * 4, a[10] + row * half * 4
            slot = i64(a[11], rows)[row]
            block, offset = slot // a[17], slot % a[17]
            for head in range(heads + kv_heads):
                at = scratch + head * width * 4
                weight = a[19] if head < heads else a[20]
                if weight:
                    _normalise(at, weight, at, width, eps)
                _rotate(at, cos, sin, half)
            narrow(scratch, a[22] + row * heads * width * 4, heads * width, 0)
            for head in range(kv_heads):
                base = (block * a[14] + head * a[15]) * kv_size
                key = scratch + (heads + head) * width * 4
                _store_key(key, a[12] + base + offset * kv_size, width, a[17], a[18], spare)
                value = scratch + (heads + kv_heads + head) * width * 4
                narrow(value, a[13] + base + offset * a[16] * kv_size, width, a[18])
        begin = take(p) * batch
