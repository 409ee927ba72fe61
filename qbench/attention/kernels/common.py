"""What the kernels share beside the formulas: flags, masks, tiles of rows, and launches."""

from __future__ import annotations

# ruff: noqa: RET505 (early returns in constexpr branches need their else in Triton)
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = triton.knobs.runtime.interpret  # asking again takes longer than it looks

# What a kernel does beside its score function, as bits of the compile-time number FLAGS: what is
# not asked for costs no instruction. Read by the host and by the kernels.
# Kernels import constants by name: what Triton keeps a compiled kernel by has the values of those,
# not of a module's attributes.
SCALED = tl.constexpr(1)  # scores times s · log n
CAPPED = tl.constexpr(2)  # softcap · tanh(score / softcap)
SLOPED = tl.constexpr(4)  # ALiBi: minus slope · distance
ELEMENTWISE = tl.constexpr(8)  # plus a bias a row, and weights need no sum of their row: sigmoid's
NEEDS_EXPM1 = tl.constexpr(16)  # see normalizers.Kernels: softpick's
SINK_ONE = tl.constexpr(32)  # 1 in the denominator
SINK_LEARNED = tl.constexpr(64)  # e^sink in the denominator
DPARAM = tl.constexpr(128)  # the backward pass gives the gradient of bias or s too
LOG_N1 = tl.constexpr(256)  # SCALED by s · log (n + 1)
DSLOPES = tl.constexpr(512)  # the backward pass gives the gradient of the slopes too
DSINKS = tl.constexpr(1024)  # the backward pass gives the gradient of the sinks too
CAUSAL = tl.constexpr(2048)  # a query sees no later key
WINDOWED = tl.constexpr(4096)  # a query sees so many keys up to its own

# Arguments of kernels whose values a compiled kernel does not depend on.
VARYING = ["seqlen_q", "seqlen_k", "window", "mask_b", "mask_h", "mask_t"]

SCORE_MOD = tl.constexpr(7)  # SCALED, CAPPED or SLOPED: the score is not the product times a number
SCORE_MOD_OR_BIAS = tl.constexpr(15)  # or ELEMENTWISE
SINK = tl.constexpr(96)


@triton.constexpr_function
def block(width):
    """Return the tile width for a head of ``width``: the next power of two, at least 16."""
    return max(16, triton.next_power_of_2(width))


@triton.jit
def to_int64(index):
    """Return ``index`` in 64 bits: a long packed batch has more elements than 32 bits can count."""
    return tl.full([], 0, tl.int64) + index


@triton.jit
def head_of(source, batch, head, strides):
    """Return the pointer to a head of a batch row. ``strides``: of batch row and head first."""
    return source + to_int64(batch) * strides[0] + to_int64(head) * strides[1]


@triton.jit
def load_sequence(seq_bounds, index, seqlen_q, seqlen_k):
    """Return sequence ``index``: batch row, first and last + 1 query row, first and last + 1 key
    row, and the shift (query row i stands at key row i + shift). ``seq_bounds``: see
    :mod:`qbench.attention.kernels.varlen`."""
    if seq_bounds is not None:
        entry = seq_bounds + index * 6
        return (
            tl.load(entry),
            tl.load(entry + 1),
            tl.load(entry + 2),
            tl.load(entry + 3),
            tl.load(entry + 4),
            tl.load(entry + 5),
        )
    else:
        return index, 0, seqlen_q, 0, seqlen_k, seqlen_k - seqlen_q


@triton.jit
def load_query_block(seq_bounds, head_counts, seqlen_q, seqlen_k, window, BLOCK_Q: tl.constexpr):
    """Return the place of a program that has BLOCK_Q queries of a head: (batch row, query head, key
    head); its first query row, and all of them [BLOCK_Q]; the sequence's first key row, and the
    limits of :func:`attn_mask`. ``head_counts``: query heads, and query heads per key head;
    ``seqlen_q``, ``seqlen_k``: rows of a batch row, without ``seq_bounds``."""
    group = head_counts[1]
    # Causal blocks at the end have the most keys: they start first, so that none starts late.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    batch, start_q, stop_q, start_k, stop_k, shift = load_sequence(
        seq_bounds, tl.program_id(2), seqlen_q, seqlen_k
    )
    first = start_q + program * BLOCK_Q
    rows = first + tl.arange(0, BLOCK_Q)
    return (batch, head, head // group), first, rows, start_k, (stop_q, stop_k, shift, window)


@triton.jit
def load_tile(
    tensor, batch, head, row, stop,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BOUNDED: tl.constexpr = True,
):  # fmt: skip
    """Return [ROWS, block(WIDTH)] from ``row`` on; zeros beyond the width, and beyond ``stop`` if
    BOUNDED. ``tensor``: a pointer or a tensor descriptor of [B, H, T, D], and its strides."""
    source, strides = tensor
    if isinstance(source, tl.tensor_descriptor):
        return source.load([batch, head, row, 0]).reshape(ROWS, block(WIDTH))
    else:
        base = head_of(source, batch, head, strides) + to_int64(row) * strides[2]
        rows = tl.arange(0, ROWS)  # [ROWS]
        columns = tl.arange(0, block(WIDTH))  # [block(WIDTH)]
        pointers = base + rows[:, None] * strides[2] + columns[None, :]  # [ROWS, block(WIDTH)]
        if BOUNDED:
            inside = (rows[:, None] + row < stop) & (columns[None, :] < WIDTH)
            return tl.load(pointers, mask=inside, other=0.0)
        elif block(WIDTH) == WIDTH:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=columns[None, :] < WIDTH, other=0.0)


@triton.jit
def store_tile(tensor, tile, batch, head, row, stop, WIDTH: tl.constexpr):
    """Store ``tile`` [ROWS, block(WIDTH)] from ``row`` on, without rows from ``stop`` on and
    columns beyond WIDTH; ``tensor``: pointer, strides."""
    target, strides = tensor
    rows = tl.arange(0, tile.shape[0])  # [ROWS]
    columns = tl.arange(0, tile.shape[1])  # [block(WIDTH)]
    pointers = head_of(target, batch, head, strides) + to_int64(row) * strides[2]
    inside = (rows[:, None] + row < stop) & (columns[None, :] < WIDTH)
    tl.store(pointers + rows[:, None] * strides[2] + columns[None, :], tile, mask=inside)


@triton.jit
def attn_mask(rows, keys, limits, mask, mask_strides, batch, head, FLAGS: tl.constexpr):
    """Return which of ``keys`` each of ``rows`` attends to, broadcast against each other.
    ``limits``: last query and key row + 1, the shift of :func:`load_sequence`, and the window.
    ``mask_strides``: of batch row, head, row and key."""
    stop_q, stop_k, shift, window = limits
    q_pos = rows + shift
    # No row of a sequence stands beyond its last key, so causality is enough.
    allowed = keys <= q_pos if CAUSAL & FLAGS else keys < stop_k
    if WINDOWED & FLAGS:
        allowed = allowed & (keys > q_pos - window)
    if mask is not None:
        pointers = head_of(mask, batch, head, mask_strides)
        pointers = pointers + to_int64(rows) * mask_strides[2] + to_int64(keys) * mask_strides[3]
        inside = (rows < stop_q) & (keys < stop_k)
        allowed = allowed & (tl.load(pointers, mask=inside, other=0) != 0)
    return allowed


@triton.jit
def key_ranges(
    first, start_k, limits, mask,
    FLAGS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the ends of three ranges of keys for a block of queries from ``first`` on: from begin
    to whole_begin (left of a sliding window for some row), to whole_end (every row sees every key),
    to end (cut by causality or the end of the sequence). Only tiles of the first and last need
    masks; with a ``mask`` all are in the last."""
    stop_q, stop_k, shift, window = limits
    begin = start_k
    end = stop_k
    whole_end = stop_k
    if CAUSAL & FLAGS:
        end = tl.minimum(stop_k, tl.minimum(first + BLOCK_Q, stop_q) + shift)
        whole_end = tl.minimum(stop_k, first + shift + 1)
    if WINDOWED & FLAGS:
        begin = tl.maximum(begin, first + shift - window + 1)
    whole_begin = begin
    if WINDOWED & FLAGS:
        partly = tl.maximum(0, first + BLOCK_Q + shift - window - begin)
        whole_begin += tl.cdiv(partly, BLOCK_K) * BLOCK_K
    whole_end = whole_begin + tl.maximum(0, whole_end - whole_begin) // BLOCK_K * BLOCK_K
    if mask is not None:
        whole_begin = begin
        whole_end = begin
    return begin, whole_begin, whole_end, end


class Launch:
    """Calls ``kernel[grid](*pointers, *numbers, **constants)`` for pointers with the same layout
    each time: tensors, descriptors and None. ``numbers``: the other run-time arguments.

    It keeps what Triton compiled: to look up a kernel of forty arguments takes Triton 60 µs on the
    host, and short sequences take the GPU 100 µs.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: tuple[Any, ...],
        constants: dict[str, Any],
    ) -> None:
        self.kernel, self.grid, self.numbers, self.constants = kernel, grid, numbers, constants
        self.run: Callable[..., None] | None = None
        self.rest: list[Any] = []

    def __call__(self, *pointers: Any) -> None:
        if self.run is not None:
            self.run(*pointers, *self.rest)
            return
        compiled = self.kernel[self.grid](*pointers, *self.numbers, **self.constants)
        if compiled is None:  # not compiled: by the interpreter, or a hook of Triton's took it
            return
        names = self.kernel.arg_names[len(pointers) + len(self.numbers) :]
        self.rest = [*self.numbers, *(self.constants[name] for name in names)]
        self.run = compiled[(*self.grid, 1, 1)[:3]]


class Describe:
    """Makes tensor descriptors of class ``kind`` with tiles of ``block_shape``, for tensors of the
    same layout (see ``ops.has_tma_layout``), which Triton checks once. ``layout``: Gluon's."""

    def __init__(self, kind: type, block_shape: tuple[int, ...], *layout: Any) -> None:
        self.kind, self.block_shape, self.layout = kind, block_shape, layout
        self.fields: dict[str, Any] | None = None

    def __call__(self, tensor: Tensor) -> Any:
        if self.fields is None:
            shape, strides = list(tensor.shape), list(tensor.stride())
            made = self.kind(tensor, shape, strides, self.block_shape, *self.layout)
            self.fields = vars(made) | {"base": None}
        made = object.__new__(self.kind)
        vars(made).update(self.fields, base=tensor)
        return made


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Return the context in which kernels are launched on ``device``.

    A thread has no CUDA context before its first use of the runtime, autograd's threads for
    gradients among them. Triton sets one only where it loads a kernel, so a kernel that another
    thread loaded would fail.
    """
    if device.type != "cuda":
        return HERE
    used = _thread.__dict__.setdefault("devices", set())
    if device.index not in used:
        torch.zeros(1, device=device)
        used.add(device.index)
    return HERE if device.index == torch.cuda.current_device() else torch.cuda.device(device)


HERE = nullcontext()
_thread = threading.local()


class Layout(NamedTuple):
    """Everything about a tensor that launches depend on. ``aligned``: its start, to 16 bytes."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool


def layout_of(tensor: Tensor | None) -> Layout | None:
    """Return the layout of ``tensor``, None for None."""
    if tensor is None:
        return None
    return Layout(tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16 == 0)
