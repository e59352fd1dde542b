"""The gated activations of the feed-forward layer, computed in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gelu_tanh(x):
    """GELU by its tanh form. tanh(y) = 1 - 2 / (exp(2y) + 1) keeps its limits when exp overflows."""
    y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return 0.5 * x * (2.0 - 2.0 / (tl.exp(2.0 * y) + 1.0))


@triton.jit
def gated(gate, up, out, size, gate_row, up_row, out_row, TILE: tl.constexpr, GELU: tl.constexpr):
    """Grid `(rows, tiles)`: `out = act(gate) * up`, act being SiLU or, with `GELU`, GELU (tanh)."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = index < size
    left = tl.load(gate + row * gate_row + index, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(up + row * up_row + index, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        left = _gelu_tanh(left)
    else:
        left = left / (1.0 + tl.exp(-left))
    tl.store(out + row * out_row + index, (left * right).to(out.dtype.element_ty), mask=mask)
