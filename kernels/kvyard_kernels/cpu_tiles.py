"""The inner loops of CPU attention, written as vector code: scores of 16 keys, their exp, weighted sums of values.

They keep their sums in registers, which a compiler does not manage to do with arrays. The first and the last
are generated for a fixed number of query rows; a row's own chain of multiply-adds is the same whatever that
number is, which is what makes a row's result independent of its neighbours. Vectors of 16 float32 are split by
the compiler where the machine's registers are narrower.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""float32 per vector; keys are scored and head widths are padded in this measure."""

_F32 = ir.FloatType()
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)


class Emit:
    """Instructions over vectors, at addresses given as int64."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def offset(self, address: Any, count: Any, size: int) -> Any:
        """`address + count * size`."""
        scaled = self.builder.mul(count, ir.Constant(_I64, size))
        return self.builder.add(address, scaled)

    def load(self, address: Any, bf16: bool) -> Any:
        """16 elements as float32, whatever the alignment."""
        if not bf16:
            return self.builder.load(self.builder.inttoptr(address, _VECTOR.as_pointer()), align=4)
        halves = ir.VectorType(_I16, LANES)
        bits = self.builder.load(self.builder.inttoptr(address, halves.as_pointer()), align=2)
        wide = self.builder.zext(bits, ir.VectorType(_I32, LANES))
        shift = ir.Constant(ir.VectorType(_I32, LANES), [16] * LANES)
        return self.builder.bitcast(self.builder.shl(wide, shift), _VECTOR)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, _VECTOR.as_pointer()), align=4)

    def spread(self, address: Any) -> Any:
        """The float32 at `address` in all lanes."""
        scalar = self.builder.load(self.builder.inttoptr(address, _F32.as_pointer()), align=4)
        first = self.builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_I32, 0))
        mask = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
        return self.builder.shuffle_vector(first, ir.Constant(_VECTOR, ir.Undefined), mask)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call("llvm.fma", a, b, c)

    def places(self, count: int) -> list[Any]:
        """Stack places that the compiler turns into registers."""
        return [cgutils.alloca_once(self.builder, _VECTOR) for _ in range(count)]

    def zero(self, places: list[Any]) -> None:
        """Set places to zero."""
        for place in places:
            self.builder.store(ir.Constant(_VECTOR, [0.0] * LANES), place)

    def accumulators(self, count: int) -> list[Any]:
        """Places set to zero."""
        places = self.places(count)
        self.zero(places)
        return places

    def from_integers(self, values: Any) -> Any:
        """int32 to float32."""
        return self.builder.sitofp(values, _VECTOR)

    def half(self, address: Any) -> Any:
        """16 float16 as float32, by shifting bits: exact for all finite values, on machines without the instruction.

        Exponent and fraction move to their places in float32; a factor of 2^112 corrects the exponent's bias and
        makes subnormal numbers right as well.
        """
        b, wide = self.builder, ir.VectorType(_I32, LANES)
        pointer = b.inttoptr(address, ir.VectorType(_I16, LANES).as_pointer())
        bits = b.zext(b.load(pointer, align=2), wide)
        magnitude = b.shl(b.and_(bits, ir.Constant(wide, [0x7FFF] * LANES)), ir.Constant(wide, [13] * LANES))
        value = b.fmul(b.bitcast(magnitude, _VECTOR), _spread(2.0**112))
        sign = b.shl(b.and_(bits, ir.Constant(wide, [0x8000] * LANES)), ir.Constant(wide, [16] * LANES))
        return b.bitcast(b.or_(b.bitcast(value, wide), sign), _VECTOR)

    def call(self, name: str, *operands: Any) -> Any:
        """An LLVM intrinsic over vectors, such as `llvm.floor`."""
        signature = ir.FunctionType(_VECTOR, [_VECTOR] * len(operands))
        function = cgutils.get_or_insert_function(self.builder.module, signature, f"{name}.v{LANES}f32")
        return self.builder.call(function, operands)

    def exponential(self, x: Any) -> Any:
        """`cpu_math.exponential` of 16 values at once, step by step the same."""
        b = self.builder
        above = b.fcmp_ordered(">=", x, _spread(-87.0))
        bounded = self.call("llvm.minnum", self.call("llvm.maxnum", x, _spread(-87.0)), _spread(88.0))
        power = self.call("llvm.floor", self.call("llvm.fma", bounded, _spread(math.log2(math.e)), _spread(0.5)))
        r = self.call("llvm.fma", power, _spread(-0.693359375), bounded)
        r = self.call("llvm.fma", power, _spread(2.12194440e-4), r)
        value = _spread(1 / 720)
        for coefficient in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
            value = self.call("llvm.fma", value, r, _spread(coefficient))
        integers = ir.VectorType(_I32, LANES)
        biased = b.add(b.fptosi(power, integers), ir.Constant(integers, [127] * LANES))
        scale = b.bitcast(b.shl(biased, ir.Constant(integers, [23] * LANES)), _VECTOR)
        return b.select(above, b.fmul(value, scale), _spread(0.0))


def _spread(value: float) -> Any:
    """A constant in all lanes, rounded to float32 as LLVM wants its constants."""
    return ir.Constant(_VECTOR, [float(np.float32(value))] * LANES)


@intrinsic
def exponential_tile(typing_context: Any, scores: Any, largest: Any, vectors: Any) -> Any:
    """`(scores, largest, vectors)`: `exp(score - largest)` in place for `vectors * 16` float32; their sum.

    The sum is taken in 16 lanes and then over the lanes in order, so it depends on the scores alone. Minus
    infinity becomes 0.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, largest, vectors = args
        emit = Emit(builder)
        (total,) = emit.accumulators(1)
        empty = ir.Constant(_VECTOR, ir.Undefined)
        first = builder.insert_element(empty, largest, ir.Constant(_I32, 0))
        most = builder.shuffle_vector(first, empty, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))
        with cgutils.for_range(builder, vectors) as loop:
            at = emit.offset(scores, loop.index, 4 * LANES)
            weights = emit.exponential(builder.fsub(emit.load(at, False), most))
            emit.store(weights, at)
            builder.store(builder.fadd(builder.load(total), weights), total)
        lanes = builder.load(total)
        result = ir.Constant(_F32, 0.0)
        for lane in range(LANES):
            result = builder.fadd(result, builder.extract_element(lanes, ir.Constant(_I32, lane)))
        return result

    return types.float32(types.int64, types.float32, types.int64), codegen


def score_tile(rows: int, bf16: bool) -> Callable[..., Any]:
    """An intrinsic `(q, keys, key_stride, width, out, out_stride)`: `out[r, lane] = sum_d q[d, r] * keys[d, lane]`.

    `q` float32 `[width, rows]`, so that one address serves all rows; `keys` `[width, key_stride]` of which 16
    lanes are read, `out` float32 `[rows, out_stride]` of which 16 are written. Addresses and counts are int64,
    strides in elements.
    """
    size = 2 if bf16 else 4

    @intrinsic
    def tile(typing_context: Any, q: Any, keys: Any, key_stride: Any, width: Any, out: Any, out_stride: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            q, keys, key_stride, width, out, out_stride = args
            emit = Emit(builder)
            sums = emit.accumulators(rows)
            with cgutils.for_range(builder, width) as loop:
                column = emit.load(emit.offset(keys, builder.mul(loop.index, key_stride), size), bf16)
                line = emit.offset(q, loop.index, 4 * rows)
                for r, place in enumerate(sums):
                    factor = emit.spread(builder.add(line, ir.Constant(_I64, 4 * r)))
                    builder.store(emit.fma(factor, column, builder.load(place)), place)
            for r, place in enumerate(sums):
                target = emit.offset(out, builder.mul(out_stride, ir.Constant(_I64, r)), 4)
                emit.store(builder.load(place), target)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(i64, i64, i64, i64, i64, i64), codegen

    return tile


def value_tile(rows: int, vectors: int, bf16: bool) -> Callable[..., Any]:
    """An intrinsic `(weights, weight_stride, values, stride, keys, out, out_stride)` that adds to `out`.

    `out[r, c] += sum_j weights[r, j] * values[j, c]` over `keys` rows of values in ascending order, for
    `vectors * 16` columns. `weights` and `out` are float32; `values` `[keys, stride]`.
    """
    size = 2 if bf16 else 4

    @intrinsic
    def tile(
        typing_context: Any,
        weights: Any,
        weight_stride: Any,
        values: Any,
        stride: Any,
        keys: Any,
        out: Any,
        out_stride: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            weights, weight_stride, values, stride, keys, out, out_stride = args
            emit = Emit(builder)
            sums = emit.accumulators(rows * vectors)
            cells = [(r, v) for r in range(rows) for v in range(vectors)]
            targets = [
                emit.offset(
                    out, builder.add(builder.mul(out_stride, ir.Constant(_I64, r)), ir.Constant(_I64, v * 16)), 4
                )
                for r, v in cells
            ]
            for place, target in zip(sums, targets, strict=True):
                builder.store(emit.load(target, False), place)
            with cgutils.for_range(builder, keys) as loop:
                row = builder.mul(loop.index, stride)
                columns = [
                    emit.load(emit.offset(values, builder.add(row, ir.Constant(_I64, v * 16)), size), bf16)
                    for v in range(vectors)
                ]
                factors = [
                    emit.spread(
                        emit.offset(
                            weights, builder.add(builder.mul(weight_stride, ir.Constant(_I64, r)), loop.index), 4
                        )
                    )
                    for r in range(rows)
                ]
                for (r, v), place in zip(cells, sums, strict=True):
                    builder.store(emit.fma(factors[r], columns[v], builder.load(place)), place)
            for place, target in zip(sums, targets, strict=True):
                emit.store(builder.load(place), target)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(i64, i64, i64, i64, i64, i64, i64), codegen

    return tile
