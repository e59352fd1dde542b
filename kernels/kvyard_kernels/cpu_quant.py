"""Products with quantised weights on the CPU: the file's own 4 and 8 bits, read once, computed in float32.

A decode step is bound by reading the weights, so reading 5 or 9 bits instead of 16 or 32 makes it that much
faster, and nothing is rounded: codes and scales are those of the file. A row's sum is taken in one order
whatever the number of rows, so results do not depend on the size of the step.

Layout: 16 outputs form a panel. Per panel and group of 32 inputs: 4-bit codes `[16, 16 outputs]` bytes whose
low halves are the inputs 0 to 15 and high halves 16 to 31, with scales and offsets `[2, 16]` float16; 8-bit
codes `[32, 16 outputs]` int8 with scales `[16]` float16. A weight is `scale * code + offset`.
"""

from __future__ import annotations

from collections.abc import Callable
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
                with cgutils.for_range(builder, ir.Constant(_I64, GROUP // 2)) as step:
                    at = emit.offset(line, step.index, 4 * rows)
                    for half, column in enumerate(_columns(emit, base, step.index, bits)):
                        for r, place in enumerate(halves[half]):
                            factor = emit.spread(builder.add(at, ir.Constant(_I64, 4 * (half * 16 * rows + r))))
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


def _columns(emit: Emit, base: Any, step: Any, bits: int) -> tuple[Any, Any]:
    """Codes of the inputs `step` and `step + 16` of a group as float32, one lane per output."""
    b, wide = emit.builder, ir.VectorType(_I32, LANES)

    def load(row: Any) -> Any:
        pointer = b.inttoptr(emit.offset(base, row, LANES), ir.VectorType(_I8, LANES).as_pointer())
        return b.load(pointer, align=1)

    if bits == 4:
        pair = b.zext(load(step), wide)
        low = b.and_(pair, ir.Constant(wide, [15] * LANES))
        high = b.lshr(pair, ir.Constant(wide, [4] * LANES))
        return emit.from_integers(low), emit.from_integers(high)
    second = b.add(step, ir.Constant(_I64, 16))
    return emit.from_integers(b.sext(load(step), wide)), emit.from_integers(b.sext(load(second), wide))


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
                for r in range(count):
                    line = scratch + r * 64
                    if a[11]:
                        values, bias = f32(line, 16), f32(a[11] + first * 4, 16)
                        for lane in range(lanes):
                            values[lane] += bias[lane]
                    narrow(line, a[12] + ((row + r) * outputs + first) * size, lanes, a[13])
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
