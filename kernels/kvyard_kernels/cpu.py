"""The CPU kernels as functions of tensors. Outputs are new tensors unless a name says otherwise.

Rotary tables, block tables and lengths are those of `reference`. The pool is `CpuPool`: block-major, so that
swapping or copying a block is one contiguous copy over all layers.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvyard_kernels import cpu_ahead, cpu_attention, cpu_quant, cpu_rows
from kvyard_kernels.cpu_quant import GROUP
from kvyard_kernels.cpu_threads import Kernel
from kvyard_kernels.cpu_tiles import LANES

_ALONE = 16_384
"""Elements up to which a row-wise kernel runs on the calling thread: waking others costs more (about 5 us)."""

_TILE_ROWS = 24
"""Query rows per attention tile (tokens times query heads of a key/value head)."""


class CpuPool:
    """KV of one model: `[blocks, layers, 2, kv_heads, block_size * padded width]`, see `cpu_attention`."""

    def __init__(
        self, blocks: int, layers: int, kv_heads: int, width: int, block_size: int, dtype: torch.dtype
    ) -> None:
        self.layers, self.kv_heads, self.width, self.block_size = layers, kv_heads, width, block_size
        self.value_width = self.padded_width(width)
        self.head_stride = block_size * self.value_width
        self.block_stride = layers * 2 * kv_heads * self.head_stride
        # 16 keys are loaded at once, so the last block is followed by as much.
        flat = torch.empty(blocks * self.block_stride + LANES, dtype=dtype)
        self._flat = flat
        self.blocks = flat[: blocks * self.block_stride].view(blocks, layers, 2, kv_heads, self.head_stride)

    @staticmethod
    def padded_width(width: int) -> int:
        """Elements that a head takes in the pool: whole vectors."""
        return -(-width // LANES) * LANES

    @property
    def dtype(self) -> torch.dtype:
        return self._flat.dtype

    def address(self, layer: int, values: bool) -> int:
        """Of the layer's keys or values in block 0."""
        offset = (2 * layer + int(values)) * self.kv_heads * self.head_stride
        return self._flat.data_ptr() + offset * self._flat.element_size()

    def keys(self, layer: int) -> Tensor:
        """A copy as `[blocks, block_size, kv_heads, width]`, the layout of the references."""
        raw = self.blocks[:, layer, 0, :, : self.width * self.block_size]
        split = raw.reshape(-1, self.kv_heads, self.width, self.block_size)
        return split.permute(0, 3, 1, 2).contiguous()

    def values(self, layer: int) -> Tensor:
        """A copy as `[blocks, block_size, kv_heads, width]`."""
        split = self.blocks[:, layer, 1].reshape(-1, self.kv_heads, self.block_size, self.value_width)
        return split[..., : self.width].permute(0, 2, 1, 3).contiguous()

    def gather(self, layer: int, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `length` tokens in these blocks (int64), each `[kv_heads, length, width]`."""
        raw = self.blocks[blocks, layer]  # [blocks, 2, kv_heads, block_size * padded width]
        keys = raw[:, 0, :, : self.width * self.block_size].reshape(-1, self.kv_heads, self.width, self.block_size)
        values = raw[:, 1].view(-1, self.kv_heads, self.block_size, self.value_width)[..., : self.width]
        tokens = (self.kv_heads, -1, self.width)
        return (
            keys.permute(1, 0, 3, 2).reshape(tokens)[:, :length],
            values.permute(1, 0, 2, 3).reshape(tokens)[:, :length],
        )


def rms_norm(residual: Tensor, weight: Tensor, eps: float, x: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Add `x` to the float32 stream `residual` in place (if given) and return its norm in `dtype`; `[t, w]`."""
    rows, width = residual.shape
    assert residual.is_contiguous(), "changed in place, row after row"
    x = None if x is None else x.contiguous()
    out = torch.empty(rows, width, dtype=dtype)
    scratch, stride, threads, batch = _plan(rows, width, width)
    x_address, x_bf16 = (0, 0) if x is None else (x.data_ptr(), _bf16(x))
    _run(
        _norm(), threads, 0, 0, rows, width, x_address, x_bf16, residual.data_ptr(), weight.data_ptr(),
        out.data_ptr(), _bf16(out), _bits(eps), scratch, stride, batch,
    )  # fmt: skip
    return out


def gated(gate_up: Tensor, gelu: bool = False) -> Tensor:
    """SwiGLU, or with `gelu` its tanh-gelu form: `[t, 2 * w]` -> `[t, w]`."""
    gate_up, rows, width = gate_up.contiguous(), gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype)
    scratch, stride, threads, batch = _plan(rows, width, 2 * width)
    _run(
        _gate(), threads, 0, 0, rows, width, gate_up.data_ptr(), _bf16(gate_up), out.data_ptr(), int(gelu),
        scratch, stride, batch,
    )  # fmt: skip
    return out


def rope_and_cache(
    qkv: Tensor,
    heads: int,
    cos: Tensor,
    sin: Tensor,
    pool: CpuPool,
    layer: int,
    cache_slots: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Turn queries and keys, put keys and values at `cache_slots`; the queries, float32 `[t, heads, d]`.

    `qkv` is `[t, (heads + 2 * kv_heads) * d]`; `norms` are float32 weights `[d]` for each head of q and of k.
    """
    qkv, rows, width = qkv.contiguous(), qkv.shape[0], pool.width
    out = torch.empty(rows, heads, width)
    scratch, stride, threads, batch = _plan(rows, qkv.shape[1], qkv.shape[1] + width)
    q_norm, k_norm = (0, 0) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr())
    _run(
        _rope(), threads, 0, 0, rows, heads, pool.kv_heads, width, cos.shape[1], qkv.data_ptr(), _bf16(qkv),
        cos.data_ptr(), sin.data_ptr(), cache_slots.data_ptr(), pool.address(layer, False),
        pool.address(layer, True), pool.block_stride, pool.head_stride, pool.value_width, pool.block_size,
        int(pool.dtype == torch.bfloat16), q_norm, k_norm, _bits(eps), out.data_ptr(), scratch, stride,
        batch,
    )  # fmt: skip
    return out


@dataclass(slots=True)
class Tiles:
    """How a step's queries are cut into work: made once per step, used by every layer."""

    tiles: Tensor
    """int32 `[m, 3]`: sequence, first token, tokens."""
    longest: int
    """Most context of any sequence."""
    work: int
    """Query-key pairs, to decide whether threads pay."""


def attention_tiles(starts: Tensor, lengths: Tensor, group: int, without: Sequence[int] = ()) -> Tiles:
    """Cut `[n + 1]` starts and `[n]` lengths (int32) into tiles of at most 24 query rows.

    `without` names sequences that something else computes.
    """
    step = max(1, _TILE_ROWS // group)
    begins, contexts = starts.numpy(), lengths.numpy()  # numpy's small operations cost a tenth of torch's
    counts = begins[1:] - begins[:-1]
    if without:
        counts[list(without)] = 0
    pieces = (counts + (step - 1)) // step
    rows = np.repeat(np.arange(len(counts), dtype=np.int32), pieces)
    piece = np.arange(len(rows), dtype=np.int32) - (np.cumsum(pieces) - pieces)[rows]
    tiles = np.empty((len(rows), 3), dtype=np.int32)
    tiles[:, 0] = rows
    tiles[:, 1] = begins[:-1][rows] + piece * step
    tiles[:, 2] = np.minimum(begins[1:][rows] - tiles[:, 1], step)
    work = int(np.dot(counts.astype(np.int64), contexts))
    return Tiles(torch.from_numpy(tiles), int(contexts.max()), work)


def paged_attention(
    q: Tensor,
    pool: CpuPool,
    layer: int,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    tiles: Tiles,
    scale: float,
    window: int,
    dtype: torch.dtype,
) -> Tensor:
    """`reference.paged_attention` over the pool: float32 `[t, h, d]` queries to `dtype` `[t, h * d]`.

    Rows that no tile covers are left as they are.
    """
    tokens, heads, width = q.shape
    q = q.contiguous()
    out = torch.empty(tokens, heads * width, dtype=dtype)
    if not len(tiles.tiles):
        return out
    group = heads // pool.kv_heads
    tile_rows = max(1, _TILE_ROWS // group) * group
    span = tiles.longest + 2 * pool.block_size + 2 * LANES
    stride = 64 + tile_rows * 4 * (width + pool.value_width + span + 1)
    items = tiles.tiles.shape[0] * pool.kv_heads
    threads = min(torch.get_num_threads(), items) if tiles.work * heads * width > _ALONE else 1
    scratch = _scratch.address(stride * threads)
    _run(
        _attention(), threads, 0, 0, items, tiles.tiles.data_ptr(), starts.data_ptr(), lengths.data_ptr(),
        tables.data_ptr(), tables.stride(0), q.data_ptr(), heads, pool.kv_heads, width, pool.address(layer, False),
        pool.address(layer, True), pool.block_stride, pool.head_stride, pool.value_width, pool.block_size,
        int(pool.dtype == torch.bfloat16), _bits(scale), window, out.data_ptr(), _bf16(out), scratch,
        stride, tile_rows,
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight matrix `[outputs, inputs]` in the layout of `cpu_quant`."""

    codes: Tensor
    """uint8 `[panels, groups, 256]` (4 bits) or `[panels, groups, 512]` (8 bits)."""
    scales: Tensor
    """float16 `[panels, groups, 2, 16]` (scale and offset) or `[panels, groups, 1, 16]`."""
    outputs: int

    @property
    def bits(self) -> int:
        return 4 if self.scales.shape[2] == 2 else 8

    @property
    def inputs(self) -> int:
        return self.codes.shape[1] * GROUP


def pack_quantised(codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Quantised:
    """Bring rows of groups into panels.

    `scales` float16 `[outputs, groups]`. With `offsets` of the same shape, 4 bits: `codes` uint8 `[outputs,
    groups, 16]`, low halves the inputs 0 to 15 of the group. Without, 8 bits: int8 `[outputs, groups, 32]`.
    """
    outputs = len(codes)
    panels = -(-outputs // LANES)
    parts = [scales] if offsets is None else [scales, offsets]
    stacked = torch.stack(parts, dim=2)  # [outputs, groups, 1 or 2]
    missing = panels * LANES - outputs
    codes = torch.nn.functional.pad(codes.view(torch.uint8), (0, 0, 0, 0, 0, missing))
    stacked = torch.nn.functional.pad(stacked, (0, 0, 0, 0, 0, missing))
    unit = 1 if offsets is None else 4  # bytes of one output that lie together
    by_panel = codes.view(panels, LANES, codes.shape[1], -1, unit).permute(0, 2, 3, 1, 4)
    scale_panels = stacked.view(panels, LANES, *stacked.shape[1:]).permute(0, 2, 3, 1)
    return Quantised(by_panel.contiguous().flatten(2), scale_panels.contiguous(), outputs)


def quantised_product(x: Tensor, weight: Quantised, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`x @ weight.T + bias` in float32, rounded to `dtype`: `[t, inputs]` -> `[t, outputs]`; bias float32.

    A row's bits depend on the row and its type alone.
    """
    rows, groups, panels = len(x), weight.codes.shape[1], len(weight.codes)
    x, out = x.contiguous(), torch.empty(rows, weight.outputs, dtype=dtype)
    sets, stride = -(-rows // 8), max(weight.inputs, 8 * LANES) * 4 + 64
    threads = min(torch.get_num_threads(), sets) if x.numel() > _ALONE else 1
    packed = _scratch.address(4 * rows * (weight.inputs + groups) + stride * torch.get_num_threads())
    sums = packed + 4 * rows * weight.inputs
    scratch = sums + 4 * rows * groups
    _run(
        _prepare(), threads, 0, 0, sets, rows, groups, x.data_ptr(), _bf16(x), packed, sums, scratch, stride,
    )  # fmt: skip
    threads = min(torch.get_num_threads(), panels)
    _run(
        _product(), threads, 0, 0, panels, rows, groups, weight.outputs, packed, sums,
        weight.codes.data_ptr(), weight.scales.data_ptr(), weight.bits, 0 if bias is None else bias.data_ptr(),
        out.data_ptr(), _bf16(out), scratch, stride, max(1, panels // (threads * 8)),
    )  # fmt: skip
    return out


def warm_up() -> None:
    """Compile every kernel (about a second each), or load it from numba's cache."""
    for kernel in (_norm, _gate, _rope):
        kernel()
    cpu_ahead.join()  # the others may be compiled there meanwhile
    for kernel in (_attention, _prepare, _product):
        kernel()


@functools.cache
def _norm() -> Kernel:
    return Kernel(cpu_rows.norm)


@functools.cache
def _gate() -> Kernel:
    return Kernel(cpu_rows.gate)


@functools.cache
def _rope() -> Kernel:
    return Kernel(cpu_rows.rope_and_cache)


@functools.cache
def _attention() -> Kernel:
    return Kernel(cpu_attention.attention)


@functools.cache
def _prepare() -> Kernel:
    return Kernel(cpu_quant.prepare)


@functools.cache
def _product() -> Kernel:
    return Kernel(cpu_quant.product)


_MOST_PARAMETERS = 32


class _Scratch(threading.local):
    """Working memory of the calling thread, kept between calls: making a tensor costs 1 us, 300 times a step."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.parameters = (ctypes.c_int64 * _MOST_PARAMETERS)()
        self.parameters_address = ctypes.addressof(self.parameters)

    def address(self, size: int) -> int:
        """Of at least `size` bytes, whose content the next call may overwrite."""
        if size > len(self._memory):
            self._memory = torch.empty(2 * size, dtype=torch.uint8)
        return self._memory.data_ptr()


_scratch = _Scratch()


def _run(kernel: Kernel, threads: int, *parameters: int) -> None:
    _layout(len(parameters)).pack_into(_scratch.parameters, 0, *parameters)
    kernel(_scratch.parameters_address, threads)


@functools.cache
def _layout(count: int) -> struct.Struct:
    return struct.Struct(f"{count}q")


def _plan(rows: int, width: int, scratch: int) -> tuple[int, int, int, int]:
    """Address of scratch, its stride per thread in bytes, threads, and rows that a thread draws at a time."""
    threads = min(torch.get_num_threads(), rows) if rows * width > _ALONE else 1
    stride = scratch * 4 + 64
    batch = rows if threads == 1 else max(1, rows // (threads * 4))
    return _scratch.address(stride * threads), stride, threads, batch


def _bf16(x: Tensor) -> int:
    return int(x.dtype == torch.bfloat16)


def _bits(value: float) -> int:
    return int(struct.unpack("q", struct.pack("d", value))[0])
