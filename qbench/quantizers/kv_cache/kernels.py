"""The rounding of :mod:`qbench.quantizers.kv_cache.rounding` in Triton: one read and one write.

Keys and values of a layer are rounded by one launch where both have a scale for each token. The
results equal the definition's bit for bit: divisions are rounded as IEEE asks, and a number is
rounded to a whole one, ties to even, by adding and taking off 1.5 · 2^23.
"""

from __future__ import annotations

from collections.abc import Sequence

# ruff: noqa: RET505 (early returns in constexpr branches need their else in Triton)
import torch
import triton
import triton.language as tl
from torch import Tensor

from qbench.quantizers.kv_cache.rounding import Format

ROW_VALUES = 4096  # of a program
MAGIC = tl.constexpr(12582912.0)
SCALE_DTYPES = {torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def whole(x):
    return (x + MAGIC) - MAGIC


@triton.jit
def e4m3(x):
    """The nearest e4m3 number: three bits after the leading one, from 2^-6 on; steps of 2^-9
    below."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.maximum(exponent, 121) - 3  # of the step, biased by 127
    step = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return whole(x * inverse) * step


@triton.jit
def rounded(
    x, inside, AXIS: tl.constexpr, LARGEST: tl.constexpr, FLOATING: tl.constexpr,
    SYMMETRIC: tl.constexpr, SCALE_DTYPE: tl.constexpr,
):  # fmt: skip
    """float32 ``x`` [M, N] as it is read back; a group lies along AXIS, where ``inside``."""
    if SYMMETRIC:
        highest = tl.max(tl.where(inside, tl.abs(x), 0.0), AXIS, keep_dims=True)
        scale = tl.div_rn(highest, tl.full(highest.shape, LARGEST, tl.float32))
        scale = scale.to(SCALE_DTYPE).to(tl.float32)
        safe = tl.where(scale == 0, 1.0, scale)
        quotient = tl.div_rn(x, tl.broadcast_to(safe, x.shape))
        quotient = tl.minimum(tl.maximum(quotient, -LARGEST), LARGEST)
        if FLOATING:
            return e4m3(quotient) * scale
        else:
            return whole(quotient) * scale
    else:
        low = tl.min(tl.where(inside, x, float("inf")), AXIS, keep_dims=True)
        high = tl.max(tl.where(inside, x, float("-inf")), AXIS, keep_dims=True)
        low = low.to(SCALE_DTYPE).to(tl.float32)
        span = tl.maximum(high - low, 0.0)
        scale = tl.div_rn(span, tl.full(span.shape, LARGEST, tl.float32))
        scale = scale.to(SCALE_DTYPE).to(tl.float32)
        safe = tl.where(scale == 0, 1.0, scale)
        quotient = tl.div_rn(x - low, tl.broadcast_to(safe, x.shape))
        quotient = tl.minimum(tl.maximum(quotient, 0.0), LARGEST)
        return whole(quotient) * scale + low


@triton.jit
def token_rows(
    source, target, positions, strides, target_strides, position_stride, heads, tokens, parts,
    first, total,
    GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, ROWS: tl.constexpr, LARGEST: tl.constexpr,
    FLOATING: tl.constexpr, SYMMETRIC: tl.constexpr, SCALE_DTYPE: tl.constexpr,
):  # fmt: skip
    """ROWS groups of one tensor: a row is one token, head and part of the head's channels."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    part = row % parts
    head = row // parts % heads
    token = row // (parts * heads) % tokens
    batch = row // (parts * heads) // tokens
    channel = tl.arange(0, BLOCK_GROUP)  # [BLOCK_GROUP]
    inside = (row < total)[:, None] & (channel < GROUP)[None, :]  # [ROWS, BLOCK_GROUP]
    base = batch * strides[0] + head * strides[1] + token * strides[2] + part * GROUP
    read = tl.load(source + base[:, None] + channel[None, :], mask=inside, other=0.0)
    x = read.to(tl.float32)
    y = rounded(x, inside, 1, LARGEST, FLOATING, SYMMETRIC, SCALE_DTYPE)
    y = tl.where(x == x, y, x).to(target.dtype.element_ty)  # NaN must not become a number
    if positions is not None:
        at = tl.load(positions + batch * position_stride + token, mask=row < total, other=0)
        y = tl.where((at < first)[:, None], read, y)
    base = batch * target_strides[0] + head * target_strides[1]
    base += token * target_strides[2] + part * GROUP
    tl.store(target + base[:, None] + channel[None, :], y, mask=inside)


@triton.jit(do_not_specialize=["tokens", "total", "first", "position_stride"])
def token_kernel(
    key, value, key_target, value_target, positions, strides, position_stride, heads, tokens,
    parts, first, total,
    GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, ROWS: tl.constexpr, LARGEST: tl.constexpr,
    FLOATING: tl.constexpr, SYMMETRIC: tl.constexpr, SCALE_DTYPE: tl.constexpr,
):  # fmt: skip
    """Programs (i, 0) round keys, (i, 1) values of the same shape."""
    k_strides, v_strides, kt_strides, vt_strides = strides
    if tl.program_id(1) == 0:
        token_rows(
            key, key_target, positions, k_strides, kt_strides, position_stride, heads, tokens,
            parts, first, total, GROUP, BLOCK_GROUP, ROWS, LARGEST, FLOATING, SYMMETRIC,
            SCALE_DTYPE,
        )  # fmt: skip
    else:
        token_rows(
            value, value_target, positions, v_strides, vt_strides, position_stride, heads, tokens,
            parts, first, total, GROUP, BLOCK_GROUP, ROWS, LARGEST, FLOATING, SYMMETRIC,
            SCALE_DTYPE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "first", "position_stride"])
def channel_kernel(
    source, target, positions, strides, target_strides, position_stride, heads, tokens, first,
    GROUP: tl.constexpr, BLOCK_TOKENS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    LARGEST: tl.constexpr, FLOATING: tl.constexpr, SYMMETRIC: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
):  # fmt: skip
    """One program GROUP tokens and a head. Whole groups do not overlap, so at most one begins
    among them: that one is rounded. Other rows of ``target`` are left as they are."""
    batch = tl.program_id(1).to(tl.int64) // heads
    head = tl.program_id(1) % heads
    index = tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
    start = tl.program_id(0) * GROUP
    token = start + index
    row = positions + batch * position_stride
    at = tl.load(row + token, mask=(index < GROUP) & (token < tokens), other=-1)
    last = token + GROUP - 1
    end = tl.load(row + last, mask=(index < GROUP) & (last < tokens), other=-1)
    begins = (at >= first) & ((at - first) % GROUP == 0) & (end == at + GROUP - 1)
    if tl.max(begins.to(tl.int32)) > 0:
        token = tl.sum(tl.where(begins, token, 0)) + index
        channel = tl.arange(0, BLOCK_D)  # [BLOCK_D]
        inside = (index < GROUP)[:, None] & (channel < WIDTH)[None, :]  # [BLOCK_TOKENS, BLOCK_D]
        base = batch * strides[0] + head * strides[1] + token.to(tl.int64) * strides[2]
        x = tl.load(source + base[:, None] + channel[None, :], mask=inside, other=0.0)
        x = x.to(tl.float32)
        y = rounded(x, inside, 0, LARGEST, FLOATING, SYMMETRIC, SCALE_DTYPE)
        y = tl.where(x == x, y, x)
        base = batch * target_strides[0] + head * target_strides[1]
        base += token.to(tl.int64) * target_strides[2]
        pointers = target + base[:, None] + channel[None, :]
        tl.store(pointers, y.to(target.dtype.element_ty), mask=inside)


def by_token(
    tensors: Sequence[Tensor], form: Format, group: int, positions: Tensor | None, first: int
) -> list[Tensor]:
    """One or two tensors [B, H, T, D] of one shape as ``rounding.by_token`` gives them, by one
    launch; tokens at ``positions`` [B or 1, T] before ``first`` come out as they are."""
    sources = [_dense_rows(tensor) for tensor in tensors]
    targets = [_target(tensor) for tensor in tensors]
    batch, heads, tokens, width = sources[0].shape
    parts = width // group
    total = batch * heads * tokens * parts
    block = triton.next_power_of_2(group)
    rows = max(1, ROW_VALUES // block)
    if total:
        given = (sources[0], sources[-1], targets[0], targets[-1])
        token_kernel[(triton.cdiv(total, rows), len(sources))](
            *given, positions if first else None, _strides(*given), _position_stride(positions),
            heads, tokens, parts, first, total, GROUP=group, BLOCK_GROUP=block, ROWS=rows,
            **_constants(form),
        )  # fmt: skip
    return targets


def by_channel(x: Tensor, form: Format, positions: Tensor, first: int, group: int) -> Tensor:
    """``x`` [B, H, T, D] as ``rounding.by_channel`` gives it, where a token's group is whole; other
    tokens come out as they are."""
    x = _dense_rows(x)
    target = _target(x).copy_(x)
    batch, heads, tokens, width = x.shape
    if target.numel():
        channel_kernel[(triton.cdiv(tokens, group), batch * heads)](
            x, target, positions, *_strides(x, target), _position_stride(positions), heads, tokens,
            first, GROUP=group, BLOCK_TOKENS=triton.next_power_of_2(group), WIDTH=width,
            BLOCK_D=triton.next_power_of_2(width), **_constants(form),
        )  # fmt: skip
    return target


def _constants(form: Format) -> dict:
    return {
        "LARGEST": form.largest,
        "FLOATING": form.floating,
        "SYMMETRIC": form.symmetric,
        "SCALE_DTYPE": SCALE_DTYPES[form.scale_dtype],
        "enable_fp_fusion": False,  # a fused product and sum would round once, the definition twice
    }


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _target(like: Tensor) -> Tensor:
    """Laid out as [B, T, H, D], which is how a pack's keys are gathered."""
    batch, heads, tokens, width = like.shape
    return like.new_empty(batch, tokens, heads, width).transpose(1, 2)


def _strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(tensor.stride()[:3] for tensor in tensors)


def _position_stride(positions: Tensor | None) -> int:
    """One row of positions serves every batch row."""
    if positions is None:
        return 0
    assert positions.dtype == torch.int32
    assert positions.stride(1) == 1
    return positions.stride(0) if positions.shape[0] > 1 else 0
