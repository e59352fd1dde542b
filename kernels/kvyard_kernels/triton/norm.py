"""RMSNorm over the last dimension, with an optional residual; float32 throughout, one program per row."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["size"])
def rms_norm(
    x,
    residual,
    weight,
    out,
    eps,
    x_row,
    residual_row,
    out_row,
    size,
    SIZE_PAD: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Grid `(rows,)`. With `RESIDUAL`, `residual += x` is stored and the unrounded sum is normalised."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SIZE_PAD)
    mask = index < size
    value = tl.load(x + row * x_row + index, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        target = residual + row * residual_row + index
        value += tl.load(target, mask=mask, other=0.0).to(tl.float32)
        tl.store(target, value.to(residual.dtype.element_ty), mask=mask)
    factor = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    scale = tl.load(weight + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + index, (value * factor * scale).to(out.dtype.element_ty), mask=mask)
