"""From products of queries and keys to scores in units of log2: soft caps, ALiBi's slopes, the
scale by a row's own length, and sigmoid's bias. ``MODES``: bits of
:mod:`qbench.attention.kernels.modes`."""

from __future__ import annotations

# ruff: noqa: RET505 (early returns in constexpr branches need their else in Triton)
import triton
import triton.language as tl

from qbench.attention.kernels.modes import (
    BIASED,
    CAPPED,
    NEAR,
    NEXT,
    SCALED,
    SINK_LEARNED,
    SLOPED,
)
from qbench.attention.kernels.softcap import tangent_and_slope, tangent_near_zero

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def hyperbolic_tangent(x, FAST: tl.constexpr):
    """FAST: one instruction, right to 2^-11 of itself, a quarter of what bf16 scores are."""
    if FAST:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        e = tl.math.exp2(tl.abs(x) * (-2 * LOG2_E))
        far = (1 - e) / (1 + e)
        square = x * x  # the series near 0, where 1 − e has lost bits: right to 1e-9 of itself
        near = 1 + square * (
            -1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))
        )
        return tl.where(tl.abs(x) < 0.15, x * near, tl.where(x < 0, -far, far))


@triton.jit
def log2_length(
    rows, value_row, limits, start_k, counts,
    MODES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """log2 of how many keys each row may see, 0 where that is none, or with NEXT of one more.
    ``counts``: these numbers, where a mask says who sees whom; ``value_row``: where a head's values
    by row begin."""
    stop_q, stop_k, shift, window = limits
    if counts is not None:
        seen = tl.load(counts + value_row + rows, mask=rows < stop_q, other=1.0)
    else:
        own = rows + shift
        last = tl.minimum(own + 1, stop_k) if CAUSAL else own * 0 + stop_k
        first = tl.maximum(own - window + 1, start_k) if WINDOW else start_k
        seen = (last - first).to(tl.float32)
    if NEXT & MODES:
        seen += 1
    return tl.math.log2(tl.maximum(seen, 1.0))


@triton.jit
def head_factor(head, s, MODES: tl.constexpr):
    """What log2 n is multiplied by, in a head."""
    if SCALED & MODES:
        return tl.load(s + head) * LN_2
    else:
        return 1.0


@triton.jit
def row_factor(length, factor, number, MODES: tl.constexpr):
    """``number`` of a head, gain or slope, times s · log n of each row."""
    if SCALED & MODES:
        return number * (factor * length)
    else:
        return number


@triton.jit
def row_level(length, head, bias, MODES: tl.constexpr):
    """Minus sigmoid's bias, in log2 units; what its backward pass is given as log-sum-exp."""
    if BIASED & MODES:
        if bias is not None:
            return length * 0 - tl.load(bias + head) * LOG2_E
        else:
            return length
    else:
        return length * 0


@triton.jit
def slope_of(head, slopes, MODES: tl.constexpr):
    """In log2 units a key."""
    if SLOPED & MODES:
        return tl.load(slopes + head) * LOG2_E
    else:
        return 0.0


@triton.jit
def sink_of(head, sinks, MODES: tl.constexpr):
    """In log2 units."""
    if SINK_LEARNED & MODES:
        return tl.load(sinks + head) * LOG2_E
    else:
        return 0.0


@triton.jit
def product(a, b):
    """a · b, rounded by itself: not added to something in one instruction. So the differences of
    what is equal are 0."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return a * b


@triton.jit
def sloped(y, keys, own, origin, slope, level):
    """Takes slope · (own − key) + level from the scores. Both count from ``origin``, a tile's
    first key or query: so what is far, and weighs little, has the coarser differences, and one of
    the two is the same in every tile. Where ``level`` is 0, a row's own key has its score as it is,
    to the last bit: some normalizers ask whether that is positive."""
    before = product((own - origin).to(tl.float32), slope) + level
    return y + (product((keys - origin).to(tl.float32), slope) - before)


@triton.jit
def shared_places(first, BLOCK_Q: tl.constexpr):
    """Of rows that stand at ``first`` and after, the key row from which a row's slope counts, with
    SHARED: one for each 16 rows, of which a thread has two, in their middle. A weight without a
    running maximum then is 2^(slope · (own − place)) times what it would be, of which each row's
    sum has the same factor: up to 2^±12 with a slope of 1."""
    return first + tl.arange(0, BLOCK_Q) // 16 * 16 + 8


@triton.jit
def shared_scores(products, keys, places, origin, gain, slope):
    """Scores with slopes from ``places``: what is added to the products is the same for both rows
    of a thread. Not for families that ask for a score's sign: here a row's own key is rounded."""
    before = (places - origin).to(tl.float32) * slope
    return products * gain + ((keys - origin).to(tl.float32) * slope - before)


@triton.jit
def capped(products, inner, factor, MODES: tl.constexpr, FAST: tl.constexpr):
    """``factor`` times the tanh of ``inner`` times the products."""
    if FAST and NEAR & MODES:
        return tangent_near_zero(products, inner, factor)
    else:
        return hyperbolic_tangent(products * inner, FAST) * factor


@triton.jit
def capped_with_slope(products, inner, MODES: tl.constexpr, FAST: tl.constexpr):
    """tanh of ``inner`` times the products, and what :func:`cap_slope` takes."""
    if FAST and NEAR & MODES:
        return tangent_and_slope(products, inner, 1.0, 0.0)
    else:
        tangents = hyperbolic_tangent(products * inner, FAST)
        return tangents, tangents


@triton.jit
def cap_slope(bend, MODES: tl.constexpr, FAST: tl.constexpr):
    """1 − tanh², what gradients of capped scores are multiplied by."""
    if FAST and NEAR & MODES:
        return bend
    else:
        return 1 - bend * bend


@triton.jit
def reshaped(
    products, keys, own, origin, gain, inner, slope, MODES: tl.constexpr, FAST: tl.constexpr
):
    """Scores in log2 units, and for the gradient what :func:`cap_slope` takes where they are
    capped, else the products: products, keys and own positions broadcast against each other.
    ``inner``: before the tanh."""
    bend = products
    if CAPPED & MODES:
        products, bend = capped_with_slope(products, inner, MODES, FAST)
    y = products * gain
    if SLOPED & MODES:
        y = sloped(y, keys, own, origin, slope, 0.0)
    return y, bend


@triton.jit
def row_scores(
    products, keys, own, origin, gain, inner, slope, level,
    MODES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Scores of the forward pass, with sigmoid's bias."""
    if CAPPED & MODES and SCALED & MODES == 0:
        y = capped(products, inner, gain, MODES, FAST)
    elif CAPPED & MODES:
        y = capped(products, inner, 1.0, MODES, FAST) * gain
    else:
        y = products * gain
    if SLOPED & MODES:
        return sloped(y, keys, own, origin, slope, level if BIASED & MODES else 0.0)
    elif BIASED & MODES:
        return y - level
    else:
        return y
