"""What the kernels share: the normalizers' formulas on a tile of scores, and whose keys are whose.

Scores are kept in units of log2: y = x · log2 e, so that e^x is one exp2 instruction. ``maximum``
is m in the same units; softpick and rectified floor it at 0, which changes neither function.

``FAMILY`` is the family, a compile-time string of ``families.FAMILIES``. A new one adds its
branch to each function here that has branches; without it, nothing compiles.
"""

from __future__ import annotations

# ruff: noqa: RET503, RET505 (early returns in constexpr branches need their else in Triton, and a
# branch that does not compile returns nothing)
import triton
import triton.language as tl

from qbench.attention.kernels.modes import SUNK
from qbench.attention.kernels.sigmoid import sigmoid
from qbench.attention.normalizers import softpick

LOG2_E = 1.4426950408889634
EPSILON = tl.constexpr(softpick.EPSILON)
LN_2 = tl.constexpr(0.6931471805599453)
NO_FORMULA = tl.constexpr("this family has no formula here")

# Below this m (in log2 units), e^(x − m) − e^(−m) has lost more bits than fp16 and bf16 keep:
# exp2 is right to about 2^-22 of e^(−m). Such tiles, which are rare, are computed again with
# a polynomial for e^x − 1.
SMALL_MAXIMUM = tl.constexpr(2.0**-11)

# So many keys share a flag, which the forward pass sets where such a row has a positive score at
# one of them: only then is a weight, computed from the score, in need of the polynomial.
CHUNK = tl.constexpr(64)

# Where lse is below this, Σ |e^x − 1| < 1: a row of few keys, or all of tiny scores. Its
# E = e^x / Σ is large, and multiplies the difference of dP and D, nearly equal where one key has
# all the weight. D from the rounded output would be too coarse (x = 0.004: a gradient wrong by a
# quarter of dP).
SMALL_LSE = tl.constexpr(0.0)

# Between these a sum of e^x without a running maximum has kept all its bits.
LARGE_TOTAL = tl.constexpr(2.0**100)
SMALL_TOTAL = tl.constexpr(2.0**-60)


@triton.jit
def wide(index):
    """In 64 bits: a long packed batch has more elements than 32 can count."""
    return tl.full([], 0, tl.int64) + index


@triton.jit
def expm1_near_zero(y):
    """e^x − 1 for x = y · ln 2, |y| ≤ 1/4: seven terms of the series, right to 1e-9 of itself."""
    x = y * LN_2
    return x * (
        1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x / 5040)))))
    )


@triton.jit
def masked_score(FAMILY: tl.constexpr):
    """The score that adds nothing: e^0 − 1 = 0 in softpick, e^−∞ = 0 elsewhere."""
    if FAMILY == "softpick":
        return 0.0
    elif FAMILY == "softmax" or FAMILY == "rectified" or FAMILY == "sigmoid":
        return float("-inf")
    else:
        tl.static_assert(False, NO_FORMULA)


@triton.jit
def first_maximum(FAMILY: tl.constexpr):
    """Where the running maximum starts."""
    if FAMILY == "softmax":
        return float("-inf")
    elif FAMILY == "softpick" or FAMILY == "rectified" or FAMILY == "sigmoid":
        return 0.0
    else:
        tl.static_assert(False, NO_FORMULA)


@triton.jit
def finite_shift(maximum, FAMILY: tl.constexpr):
    """What exponents are shifted by: the running maximum, but not −∞ − (−∞) in a row that has
    seen no key yet."""
    if FAMILY == "softmax":
        return tl.where(maximum == float("-inf"), 0.0, maximum)
    elif FAMILY == "softpick" or FAMILY == "rectified":
        return maximum
    else:
        tl.static_assert(False, NO_FORMULA)


@triton.jit
def lost_bits(total, FAMILY: tl.constexpr):
    """Whether a sum without a running maximum has left the range in which it keeps its bits.
    Rectified terms are at least 1; of softpick's small sums NEAR_ZERO takes care."""
    lost = ~(total < LARGE_TOTAL)
    if FAMILY == "softmax":
        return lost | (total < SMALL_TOTAL)
    elif FAMILY == "softpick" or FAMILY == "rectified":
        return lost
    else:
        tl.static_assert(False, NO_FORMULA)


@triton.jit
def terms(y, shift, FAMILY: tl.constexpr, PRECISE: tl.constexpr):
    """What each score adds above and below the fraction line, times 2^−shift. What it adds above
    is still to be rectified, by :func:`rounded`."""
    e = tl.math.exp2(y - shift)
    if FAMILY == "softpick":
        floor = tl.math.exp2(-shift)
        difference = e - floor
        if PRECISE:
            difference = tl.where(tl.abs(y) < 0.25, floor * expm1_near_zero(y), difference)
        return difference, tl.abs(difference)
    elif FAMILY == "rectified":
        e = tl.where(y >= 0, e, 0.0)
        return e, e
    elif FAMILY == "softmax":
        return e, e
    else:
        tl.static_assert(False, NO_FORMULA)


@triton.jit
def rounded(above, dtype: tl.constexpr, FAMILY: tl.constexpr, FUSED: tl.constexpr):
    """Weights as an operand of a matrix product: softpick's rectified, then rounded to ``dtype``.
    FUSED does both to two bf16 values in one instruction, which the compiler does not find."""
    if FAMILY == "softmax" or FAMILY == "rectified" or FAMILY == "sigmoid":
        return above.to(dtype)
    elif FAMILY == "softpick":
        if FUSED:
            return tl.inline_asm_elementwise(
                "cvt.rn.relu.bf16x2.f32 $0, $2, $1;",
                "=r,r,r",
                [above],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
        else:
            return tl.maximum(above, 0.0).to(dtype)
    else:
        tl.static_assert(False, NO_FORMULA)


@triton.jit
def narrowed(gradient, dtype: tl.constexpr):
    """A gradient in ``dtype``. Where all scores of a row are tiny, softpick's gradient is huge
    (1 / Σ up to 1e6): fp16 holds its largest number then, not infinity."""
    if dtype == tl.float16:
        gradient = tl.minimum(tl.maximum(gradient, -65504.0), 65504.0)
    return gradient.to(dtype)


@triton.jit
def finish(acc, total, maximum, sink, FAMILY: tl.constexpr, MODES: tl.constexpr):
    """The output rows, and each row's log-sum-exp in log2 units: lse = m + log2 Σ, in softpick of
    |e^x − 1|. From it the backward pass recomputes weights as 2^(y − lse). A row with nothing to
    attend to gives 0 and +∞. Sigmoid's sums are ready, and ``maximum`` is what its backward pass
    subtracts from the scores."""
    if FAMILY == "softpick":
        total += EPSILON
        return acc / total[:, None], maximum + tl.math.log2(total)
    elif FAMILY == "sigmoid":
        return acc, maximum
    elif FAMILY == "softmax" or FAMILY == "rectified":
        if SUNK & MODES:
            raised = tl.maximum(maximum, sink)
            raised = tl.where(raised == float("-inf"), 0.0, raised)
            lower = tl.math.exp2(maximum - raised)
            acc = acc * lower[:, None]
            total = total * lower + tl.math.exp2(sink - raised)
            maximum = raised
        empty = total == 0
        safe = tl.where(empty, 1.0, total)
        lse = tl.where(empty, float("inf"), maximum + tl.math.log2(safe))
        return acc / safe[:, None], lse
    else:
        tl.static_assert(False, NO_FORMULA)


@triton.jit
def recomputed(
    scores, scale, lse,
    FAMILY: tl.constexpr, MODES: tl.constexpr, PRECISE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """E = e^(x − m) / Σ of every score, and its weight, for :func:`rounded`."""
    y = scores * scale
    e = tl.math.exp2(y - lse)
    if FAMILY == "softpick":
        floor = tl.math.exp2(-lse)
        weight = e - floor
        if PRECISE:
            weight = tl.where(tl.abs(y) < 0.25, floor * expm1_near_zero(y), weight)
        return e, weight
    elif FAMILY == "rectified":
        e = tl.where(scores >= 0, e, 0.0)
        return e, e
    elif FAMILY == "softmax":
        return e, e
    elif FAMILY == "sigmoid":
        weight = sigmoid(y - lse, FAST, MODES)
        return weight, weight
    else:
        tl.static_assert(False, NO_FORMULA)


@triton.jit
def score_gradient(e, scores, dp, delta, FAMILY: tl.constexpr):
    """Gradients of the scores, with dP = dO · v and D = dO · o. Softpick's is equation 7,
    dS = E · (step(x) dP − sign(x) D); a score of exactly 0, where the function has a kink, counts
    as negative."""
    if FAMILY == "softpick":
        return e * tl.where(scores > 0, dp - delta, delta)
    elif FAMILY == "sigmoid":
        return (e - e * e) * dp
    elif FAMILY == "softmax" or FAMILY == "rectified":
        return e * (dp - delta)
    else:
        tl.static_assert(False, NO_FORMULA)


@triton.jit
def sequence(spans, index, queries, keys):
    """Batch row, first and last + 1 query row, first and last + 1 key row, and the shift: query
    row i stands at key row i + shift."""
    if spans is not None:
        entry = spans + index * 6
        return (
            tl.load(entry),
            tl.load(entry + 1),
            tl.load(entry + 2),
            tl.load(entry + 3),
            tl.load(entry + 4),
            tl.load(entry + 5),
        )
    else:
        return index, 0, queries, 0, keys, keys - queries


@triton.jit
def load_rows(
    source, batch, head, row, stop, strides,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BOUNDED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """[ROWS, BLOCK_WIDTH] from ``row`` on; zeros beyond the width, and beyond ``stop`` where
    BOUNDED. With TMA ``source`` is a tensor descriptor of [B, H, T, D], else a pointer."""
    if TMA:
        return source.load([batch, head, row, 0]).reshape(ROWS, BLOCK_WIDTH)
    else:
        base = source + wide(batch) * strides[0] + wide(head) * strides[1]
        base += wide(row) * strides[2]
        rows = tl.arange(0, ROWS)  # [ROWS]
        columns = tl.arange(0, BLOCK_WIDTH)  # [BLOCK_WIDTH]
        pointers = base + rows[:, None] * strides[2] + columns[None, :]  # [ROWS, BLOCK_WIDTH]
        if BOUNDED:
            inside = (rows[:, None] + row < stop) & (columns[None, :] < WIDTH)
            return tl.load(pointers, mask=inside, other=0.0)
        elif BLOCK_WIDTH == WIDTH:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=columns[None, :] < WIDTH, other=0.0)


@triton.jit
def visible(
    rows, keys, limits, mask, mask_strides, batch, head, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    """Which of ``keys`` each of ``rows`` attends to; the two broadcast against each other, and so
    does the result. ``limits``: last query and key row + 1, the shift of :func:`sequence`, and the
    window. ``mask_strides``: of batch row, head, row and key."""
    stop_q, stop_k, shift, window = limits
    own = rows + shift
    # No row of a sequence stands beyond its last key, so causality is enough.
    seen = keys <= own if CAUSAL else keys < stop_k
    if WINDOW:
        seen = seen & (keys > own - window)
    if mask is not None:
        pointers = mask + wide(batch) * mask_strides[0] + wide(head) * mask_strides[1]
        pointers = pointers + wide(rows) * mask_strides[2] + keys * mask_strides[3]
        inside = (rows < stop_q) & (keys < stop_k)
        seen = seen & (tl.load(pointers, mask=inside, other=0) != 0)
    return seen
