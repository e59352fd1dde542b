"""Products with quantised weights on the CPU: the file's own 4 and 8 bits, read once, computed in float32.

A decode step is bound by reading the weights, so reading 5 or 9 bits instead of 16 or 32 makes it that much
faster, and nothing is rounded: codes and scales are those of the file. A row's sum is taken in one order
whatever the number of rows, so results do not depend on the size of the step.

Layout: 16 outputs form a panel. Per panel and group of 32 inputs: 4-bit codes `[4, 16 outputs, 4]` bytes, where
byte i of an output holds input i in its low and input 16 + i in its high half, with scales and offsets `[2, 16]`
float16; 8-bit codes `[32, 16 outputs]` int8 with scales `[16]` float16. A weight is `scale * code + offset`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kvyard_kernels.cpu_memory import f32, i64, narrow, take, widen
from kvyard_kernels.cpu_tiles import LANES, Emit

PRODUCT = (
    "counter", "lane", "panels", "rows", "groups", "outputs", "x", "sums", "codes", "scales", "bits", "bias", "out",
    "out_bf16", "scratch", "scratch_stride", "batch",
)  # fmt: skip
PREPARE = (
    "counter",
    "lane",
    "sets",
    "rows",
    "groups",
    "given",
    "given_bf16",
    "x",
    "sums",
    "scratch",
    "scratch_stride",
)
"""Names of each kernel's int64 parameters, in order."""

GROUP = 32
"""Inputs that share a scale."""

_I8 = ir.IntType(8)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


def _tile(rows: int, bits: int) -> Callable[..., Any]:
    """An intrinsic `(x, sums, codes, scales, groups, out)` for one panel: `out[r, lane]`, float32 `[rows, 16]`.

    `x` float32 `[groups * 32, rows]`; `sums` `[groups, rows]`, the sum of x over each group (for the offsets).
    """

    @intrinsic
    def tile(typing_context: Any, x: Any, sums: Any, codes: Any, scales: Any, groups: Any, out: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, sums, codes, scales, groups, out = args
            emit = Emit(builder)
            totals = emit.accumulators(rows)
            halves = [emit.places(rows), emit.places(rows)]
            with cgutils.for_range(builder, groups) as group:
                emit.zero(halves[0] + halves[1])
                line = emit.offset(x, group.index, 4 * GROUP * rows)
                base = emit.offset(codes, group.index, 16 * LANES * (1 if bits == 4 else 2))
                with cgutils.for_range(builder, ir.Constant(_I64, 4)) as chunk:
                    at = emit.offset(line, chunk.index, 4 * 4 * rows)
                    for half, step, column in _columns(emit, base, chunk.index, bits):
                        for r, place in enumerate(halves[half]):
                            factor = emit.spread(
                                builder.add(at, ir.Constant(_I64, 4 * ((half * 16 + step) * rows + r)))
                            )
                            builder.store(emit.fma(factor, column, builder.load(place)), place)
                scale = emit.offset(scales, group.index, 2 * LANES * (2 if bits == 4 else 1))
                group_sums = emit.offset(sums, group.index, 4 * rows) if bits == 4 else None
                _add_group(emit, totals, halves, scale, group_sums)
            for r, place in enumerate(totals):
                emit.store(builder.load(place), builder.add(out, ir.Constant(_I64, 4 * LANES * r)))
            return context.get_dummy_value()

        i64_type = types.int64
        return types.void(*[i64_type] * 6), codegen

    return tile


def _columns(emit: Emit, base: Any, chunk: Any, bits: int) -> Iterator[tuple[int, int, Any]]:
    """Codes as float32, one lane per output, of the inputs `16 * half + 4 * chunk + step`: `(half, step, codes)`."""
    b, wide = emit.builder, ir.VectorType(_I32, LANES)
    if bits == 4:
        nibbles = b.load(b.inttoptr(emit.offset(base, chunk, 4 * LANES), wide.as_pointer()), align=1)
        for nibble in range(8):
            shifted = b.lshr(nibbles, ir.Constant(wide, [4 * nibble] * LANES))
            yield nibble % 2, nibble // 2, emit.from_integers(b.and_(shifted, ir.Constant(wide, [15] * LANES)))
        return
    rows = emit.offset(base, chunk, 4 * LANES)
    for half, step in ((half, step) for step in range(4) for half in range(2)):
        address = b.add(rows, ir.Constant(_I64, (16 * half + step) * LANES))
        signed = b.load(b.inttoptr(address, ir.VectorType(_I8, LANES).as_pointer()), align=1)
        yield half, step, emit.from_integers(b.sext(signed, wide))


def _add_group(emit: Emit, totals: Any, halves: Any, scales: Any, sums: Any) -> None:
    """`total += scale * (low half + high half) + offset * sum of x`."""
    b = emit.builder
    scale = emit.half(scales)
    offset = None if sums is None else emit.half(b.add(scales, ir.Constant(_I64, 2 * LANES)))
    for r, total in enumerate(totals):
        both = b.fadd(b.load(halves[0][r]), b.load(halves[1][r]))
        value = emit.fma(scale, both, b.load(total))
        if offset is not None:
            value = emit.fma(offset, emit.spread(b.add(sums, ir.Constant(_I64, 4 * r))), value)
        b.store(value, total)


_four_8, _four_4, _four_2, _four_1 = (_tile(n, 4) for n in (8, 4, 2, 1))
_eight_8, _eight_4, _eight_2, _eight_1 = (_tile(n, 8) for n in (8, 4, 2, 1))


@njit
def together(left: int) -> int:
    """How many of `left` rows are computed at once."""
    if left >= 8:
        return 8
    return 4 if left >= 4 else (2 if left >= 2 else 1)


@njit
def _panel(count: int, x: int, sums: int, codes: int, scales: int, groups: int, out: int, bits: int) -> None:
    if bits == 4:
        if count == 8:
            _four_8(x, sums, codes, scales, groups, out)
        elif count == 4:
            _four_4(x, sums, codes, scales, groups, out)
        elif count == 2:
            _four_2(x, sums, codes, scales, groups, out)
        else:
            _four_1(x, sums, codes, scales, groups, out)
    elif count == 8:
        _eight_8(x, sums, codes, scales, groups, out)
    elif count == 4:
        _eight_4(x, sums, codes, scales, groups, out)
    elif count == 2:
        _eight_2(x, sums, codes, scales, groups, out)
    else:
        _eight_1(x, sums, codes, scales, groups, out)


@njit
def write_panel(panel: int, rows: int, bias: int, out: int, stride: int, lanes: int, bf16: int) -> None:
    """`[rows, 16]` float32 at `panel`, with the bias at `bias` if any, to `lanes` columns of `out`."""
    size = 2 if bf16 else 4
    for r in range(rows):
        line = panel + r * 64
        if bias:
            values, added = f32(line, 16), f32(bias, 16)
            for lane in range(lanes):
                values[lane] += added[lane]
        narrow(line, out + r * stride * size, lanes, bf16)


def product(p: int) -> None:
    """Draw panels until none is left. Parameters: `PRODUCT`; `x` and `sums` as `prepare` made them."""
    a = i64(p, 17)
    panels, rows, groups, outputs, bits, batch = a[2], a[3], a[4], a[5], a[10], a[16]
    scratch = a[14] + take(p + 8) * a[15]
    size = 2 if a[13] else 4
    code_bytes, scale_bytes = groups * (256 if bits == 4 else 512), groups * (64 if bits == 4 else 32)
    begin = take(p) * batch
    while begin < panels:
        for panel in range(begin, min(panels, begin + batch)):
            first = panel * 16
            lanes = min(np.int64(16), outputs - first)
            row = np.int64(0)
            while row < rows:
                count = together(rows - row)
                x, sums = a[6] + row * groups * 128, a[7] + row * groups * 4
                _panel(count, x, sums, a[8] + panel * code_bytes, a[9] + panel * scale_bytes, groups, scratch, bits)
                bias = a[11] + first * 4 if a[11] else 0
                write_panel(scratch, count, bias, a[12] + (row * outputs + first) * size, outputs, lanes, a[13])
                row += count
        begin = take(p) * batch


def prepare(p: int) -> None:
    """Rows to float32, transposed in the sets that `product` takes together, and their sums per group.

    One item is a set of up to 8 rows. Parameters: `PREPARE`.
    """
    a = i64(p, 11)
    sets, rows, groups = a[2], a[3], a[4]
    scratch = a[9] + take(p + 8) * a[10]
    width = groups * 32
    item = take(p)
    while item < sets:
        row, end = item * 8, min(rows, item * 8 + 8)
        while row < end:
            count = together(end - row)
            out = f32(a[7] + row * width * 4, count * width)
            sums = f32(a[8] + row * groups * 4, count * groups)
            for r in range(count):
                widen(a[5] + (row + r) * width * (2 if a[6] else 4), scratch, width, a[6])
                values = f32(scratch, width)
                for g in range(groups):
                    total = np.float32(0.0)
                    for i in range(g * 32, g * 32 + 32):
                        total += values[i]
                        out[i * count + r] = values[i]
                    sums[g * count + r] = total
            row += count
        item = take(p)
