"""Raw memory inside compiled CPU kernels: arrays over addresses, type changes of bits, an atomic counter.

A kernel is a C function of one pointer to int64 parameters (addresses, sizes, flags, bit patterns of
float64), so that the OpenMP runtime can call it and no per-argument conversion is paid (see `cpu_threads`).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

SIGNATURE = types.void(types.int64)  # type: ignore[no-untyped-call]  # numba has no types
"""Of every kernel: the address of its parameters. Numba's cache finds what was compiled by it."""


def _pointer(element: Any) -> Any:
    """An intrinsic that turns an int64 address into a pointer to `element`."""

    @intrinsic
    def convert(typing_context: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(address), codegen

    return convert


_to_f32 = _pointer(types.float32)
_to_i32 = _pointer(types.int32)
_to_u32 = _pointer(types.uint32)
_to_i64 = _pointer(types.int64)
_to_u16 = _pointer(types.uint16)


@njit
def f32(address: int, length: int) -> Any:
    """float32 `[length]` at `address`."""
    return carray(_to_f32(address), (length,))


@njit
def i32(address: int, length: int) -> Any:
    """int32 `[length]` at `address`."""
    return carray(_to_i32(address), (length,))


@njit
def u32(address: int, length: int) -> Any:
    """uint32 `[length]` at `address`."""
    return carray(_to_u32(address), (length,))


@njit
def i64(address: int, length: int) -> Any:
    """int64 `[length]` at `address`."""
    return carray(_to_i64(address), (length,))


@njit
def u16(address: int, length: int) -> Any:
    """uint16 `[length]` at `address`: bfloat16 as bits."""
    return carray(_to_u16(address), (length,))


@intrinsic
def float_bits(typing_context: Any, bits: Any) -> Any:
    """int32 bits read as a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def double_bits(typing_context: Any, bits: Any) -> Any:
    """int64 bits read as a float64: how a parameter that is no integer is passed."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), codegen


@intrinsic
def take(typing_context: Any, address: Any) -> Any:
    """Atomically add 1 to the int64 at `address`; what stood there before. Threads draw their work by it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], cgutils.intp_t.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(cgutils.intp_t, 1), "monotonic")

    return types.int64(types.int64), codegen


@njit
def widen(source: int, target: int, count: int, bf16: int) -> None:
    """Copy `count` elements (bfloat16 if `bf16`, else float32) at `source` to float32 at `target`."""
    if bf16:
        narrow_bits, wide_bits = u16(source, count), u32(target, count)
        for i in range(count):
            wide_bits[i] = types.uint32(narrow_bits[i]) << types.uint32(16)
    else:
        given, wide = f32(source, count), f32(target, count)
        for i in range(count):
            wide[i] = given[i]


@njit
def narrow(source: int, target: int, count: int, bf16: int) -> None:
    """Copy `count` float32 at `source` to bfloat16 (nearest, ties to even; NaN stays NaN) or float32."""
    if bf16:
        wide_bits, narrow_bits = u32(source, count), u16(target, count)
        for i in range(count):
            bits = wide_bits[i]
            rounded = bits + types.uint32(0x7FFF) + ((bits >> types.uint32(16)) & types.uint32(1))
            is_nan = (bits & types.uint32(0x7FFFFFFF)) > types.uint32(0x7F800000)
            narrow_bits[i] = types.uint16(0x7FC0) if is_nan else types.uint16(rounded >> types.uint32(16))
    else:
        given, out = f32(source, count), f32(target, count)
        for i in range(count):
            out[i] = given[i]
