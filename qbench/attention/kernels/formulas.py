"""The score functions: softmax, softpick, rectified, sigmoid, on a tile of scores.

This file has all that the kernels know of them: the forward pass' terms p and their sum l, the
backward pass' p and dS, and the gradients of parameters. Triton and Gluon kernels call the same
functions. A new one adds its branch to each function that has branches, which does not compile
without, its name to ``normalizer.SCORE_FUNCTIONS``, and its normalizer's file (``normalizers/``).

Scores are kept in units of log2: y = x · log2 e, so that e^x is one exp2 instruction. m is the
running maximum in the same units; softpick and rectified floor it at 0, which changes neither
function. ``lse`` of a row is m + log2 l, so that the backward pass has E = e^(x − m) / l =
2^(y − lse). FAST: bf16 on a GPU, whose inline PTX the interpreter does without. PRECISE: e^x − 1
near 0 by its series. FTZ: denormal results become 0.
"""

from __future__ import annotations

# ruff: noqa: RET503, RET505 (early returns in constexpr branches need their else in Triton, and a
# branch that does not compile returns nothing)
import triton
import triton.language as tl

from qbench.attention.kernels import ptx
from qbench.attention.kernels.common import (
    CAPPED,
    CAUSAL,
    ELEMENTWISE,
    LOG_N1,
    SCALED,
    SCORE_MOD,
    SCORE_MOD_OR_BIAS,
    SINK,
    SINK_LEARNED,
    SLOPED,
    WINDOWED,
)
from qbench.attention.normalizers import softpick

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
EPSILON = tl.constexpr(softpick.EPSILON)
NO_FORMULA = tl.constexpr("this score function has no formula here")

# Below this m (in log2 units), softpick's e^(x − m) − e^(−m) has lost more bits than fp16 and bf16
# keep: exp2 is right to about 2^-22 of e^(−m). Such blocks, which are rare, are computed again with
# a polynomial for e^x − 1.
SMALL_MAX = tl.constexpr(2.0**-11)

# So many keys share a flag ``needs_expm1``, which the forward pass sets where such a row has a
# positive score at one of them: only there does the backward pass need the polynomial for p.
CHUNK = tl.constexpr(64)

# Where softpick's lse is below this, Σ |e^x − 1| < 1: a row of few keys, or all of tiny scores. Its
# E = e^x / Σ is large, and multiplies the difference of dP and D, nearly equal where one key has
# all the weight. D from the rounded output would be too coarse (x = 0.004: a gradient wrong by a
# quarter of dP).
SMALL_LSE = tl.constexpr(0.0)

# Between these a sum of e^x without a running maximum has kept all its bits.
LARGE_SUM = tl.constexpr(2.0**100)
SMALL_SUM = tl.constexpr(2.0**-60)


# The score functions: forward pass.


@triton.constexpr_function
def masked_score(norm):
    """Return the score that adds nothing: e^0 − 1 = 0 in softpick, e^−∞ = 0 elsewhere."""
    lowest = float("-inf")
    return {"softpick": 0.0, "softmax": lowest, "rectified": lowest, "sigmoid": lowest}[norm]


@triton.constexpr_function
def initial_max(norm):
    """Return the value that the running maximum starts from."""
    lowest = float("-inf")
    return {"softpick": 0.0, "softmax": lowest, "rectified": 0.0, "sigmoid": lowest}[norm]


@triton.jit
def finite_max(m, NORM: tl.constexpr):
    """Return the shift of exponents: the running maximum, but 0 in a row that has seen no key yet,
    since −∞ − (−∞) is NaN."""
    if NORM == "softmax" or NORM == "sigmoid":
        return tl.where(m == float("-inf"), 0.0, m)
    elif NORM == "softpick" or NORM == "rectified":
        return m
    else:
        tl.static_assert(False, NO_FORMULA)


@triton.jit
def sum_lost_bits(l_i, NORM: tl.constexpr):
    """Return whether a sum without a running maximum has left the range in which it keeps its bits.
    Rectified terms are at least 1; SMALL_MAX is for softpick's small sums."""
    lost = ~(l_i < LARGE_SUM)
    if NORM == "softmax":
        return lost | (l_i < SMALL_SUM)
    elif NORM == "softpick" or NORM == "rectified":
        return lost
    else:
        tl.static_assert(False, NO_FORMULA)


@triton.jit
def forward_terms(y, m, NORM: tl.constexpr, PRECISE: tl.constexpr):
    """Return what each score adds to the numerator and to the denominator, times 2^−m. The
    numerator is still to be rectified, by :func:`cast_p`."""
    e = tl.math.exp2(y - m)
    if NORM == "softpick":
        floor = tl.math.exp2(-m)
        difference = e - floor
        if PRECISE:
            difference = tl.where(tl.abs(y) < 0.25, floor * expm1_near_zero(y), difference)
        return difference, tl.abs(difference)
    elif NORM == "rectified":
        e = tl.where(y >= 0, e, 0.0)
        return e, e
    elif NORM == "softmax":
        return e, e
    else:
        tl.static_assert(False, NO_FORMULA)


@triton.jit
def cast_p(p, dtype: tl.constexpr, NORM: tl.constexpr, FAST: tl.constexpr):
    """Return weights as a product's operand: rectified for softpick, then rounded to ``dtype``."""
    if NORM == "softmax" or NORM == "rectified" or NORM == "sigmoid":
        return p.to(dtype)
    elif NORM == "softpick":
        if FAST:
            return ptx.relu_to_bf16(p)
        else:
            return tl.maximum(p, 0.0).to(dtype)
    else:
        tl.static_assert(False, NO_FORMULA)


@triton.jit
def finalize(acc, l_i, m_i, sink, NORM: tl.constexpr, FLAGS: tl.constexpr):
    """Return the output rows, and each row's lse. A row without keys gives 0 and +∞. For sigmoid
    ``m_i`` is what its backward pass subtracts from the scores."""
    if NORM == "softpick":
        l_i += EPSILON
        return acc / l_i[:, None], m_i + tl.math.log2(l_i)
    elif NORM == "sigmoid":
        return acc, m_i
    elif NORM == "softmax" or NORM == "rectified":
        if SINK & FLAGS:
            m_ij = tl.maximum(m_i, sink)
            m_ij = tl.where(m_ij == float("-inf"), 0.0, m_ij)
            alpha = tl.math.exp2(m_i - m_ij)
            acc = acc * alpha[:, None]
            l_i = l_i * alpha + tl.math.exp2(sink - m_ij)
            m_i = m_ij
        empty = l_i == 0
        safe = tl.where(empty, 1.0, l_i)
        lse = tl.where(empty, float("inf"), m_i + tl.math.log2(safe))
        return acc / safe[:, None], lse
    else:
        tl.static_assert(False, NO_FORMULA)


@triton.jit
def online_softmax(
    acc, l_i, m_i, scores, scale,
    NORM: tl.constexpr, PRECISE: tl.constexpr, FAST: tl.constexpr, MOSTLY_SMALL: tl.constexpr,
):  # fmt: skip
    """Return what a tile of scores [R, K] adds to the numerator [R, K], and the running output
    ``acc`` [R, D], sum ``l_i`` and maximum ``m_i`` [R], rescaled to the new maximum. The sum
    includes the tile, the output does not. Sigmoid's weights need neither. MOSTLY_SMALL: sigmoid's
    are."""
    if NORM == "sigmoid":
        return sigmoid(scores, FAST, MOSTLY_SMALL), acc, l_i, m_i
    else:
        m_ij = tl.maximum(m_i, tl.max(scores, 1) * scale)  # [R]
        shift = finite_max(m_ij, NORM)  # [R]
        p, below = forward_terms(scores * scale, shift[:, None], NORM, PRECISE)
        alpha = tl.math.exp2(m_i - shift)  # [R]
        l_i = l_i * alpha + tl.sum(below, 1)  # [R]
        return p, acc * alpha[:, None], l_i, m_ij


# The score functions: backward pass.


@triton.jit
def recompute_e(z, s, NORM: tl.constexpr, FAST: tl.constexpr, FTZ: tl.constexpr):
    """Return E, the factor of dS, from scores less their row's lse; ``s`` has the scores' sign. For
    sigmoid E is the weight, σ(z)."""
    if NORM == "softmax" or NORM == "softpick":
        return exp2(z, FTZ)
    elif NORM == "rectified":
        return tl.where(s >= 0, exp2(z, FTZ), 0.0)
    elif NORM == "sigmoid":
        return sigmoid(z, FAST, FAST)
    else:
        tl.static_assert(False, NO_FORMULA)


@triton.jit
def recompute_p(e, y, floor, NORM: tl.constexpr, PRECISE: tl.constexpr):
    """Return the weights from E, for :func:`cast_p`. ``floor``: 2^−lse, which softpick's need."""
    if NORM == "softpick":
        p = e - floor
        if PRECISE:
            p = tl.where(tl.abs(y) < 0.25, floor * expm1_near_zero(y), p)
        return p
    elif NORM == "softmax" or NORM == "rectified" or NORM == "sigmoid":
        return e
    else:
        tl.static_assert(False, NO_FORMULA)


@triton.jit
def score_gradient(e, s, dp, delta, NORM: tl.constexpr, FAST: tl.constexpr):
    """Return dS, the scores' gradients, from E, ``s``, dP = dO · v and D = dO · o (``delta``).

    Softpick's is equation 7 of its paper, dS = E · (step(x) dP − sign(x) D); a score of exactly 0,
    where the function has a kink, counts as negative. Like equation 7 it takes the e^m beside ε for
    a constant: at a row's largest score it leaves out −ε · E · D, 10⁻⁶ of its own second term. That
    shows where the two terms cancel, in rows of one key (one score of 0.01: 1 % of dS). The
    reference has the term.
    """
    if NORM == "softpick":
        if FAST:
            return ptx.softpick_ds(e, s, dp, delta)
        else:
            return e * tl.where(s > 0, dp - delta, delta)
    elif NORM == "sigmoid":
        return (e - e * e) * dp
    elif NORM == "softmax" or NORM == "rectified":
        return e * (dp - delta)
    else:
        tl.static_assert(False, NO_FORMULA)


@triton.jit
def sink_gradient(sink, lse, delta):
    """Return what a row adds to the gradient of its head's learned sink: −p_sink · D. ``sink`` and
    ``lse`` are in log2 units; ``delta`` is D."""
    return -tl.math.exp2(sink - lse) * delta


# Their arithmetic.


@triton.jit
def exp2(y, FTZ: tl.constexpr):
    """Return 2^y. FTZ: by fewer instructions, with 0 for denormal numbers."""
    if FTZ:
        return ptx.exp2_ftz(y)
    else:
        return tl.math.exp2(y)


@triton.jit
def expm1_near_zero(y):
    """Return e^x − 1 for x = y · ln 2, |y| ≤ 1/4: seven terms of the series, right to 1e-9."""
    x = y * LN_2
    return x * (
        1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x / 5040)))))
    )


@triton.jit
def sigmoid(z, FAST: tl.constexpr, MOSTLY_SMALL: tl.constexpr):
    """Return 1 / (1 + 2^−z)."""
    if MOSTLY_SMALL:
        return ptx.sigmoid_mostly_small(z)
    elif FAST:
        return ptx.sigmoid(z)
    else:
        return 1 / (1 + tl.math.exp2(-z))


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """Return tanh(x)."""
    if FAST:
        return ptx.tanh(x)
    else:
        e = tl.math.exp2(tl.abs(x) * (-2 * LOG2_E))
        far = (1 - e) / (1 + e)
        square = x * x  # the series near 0, where 1 − e has lost bits: right to 1e-9 of itself
        near = 1 + square * (
            -1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))
        )
        return tl.where(tl.abs(x) < 0.15, x * near, tl.where(x < 0, -far, far))


@triton.jit
def cast_saturate(gradient, dtype: tl.constexpr):
    """Return a gradient in ``dtype``. If all scores of a row are tiny, softpick's gradient is huge
    (1 / Σ up to 1e6): fp16 holds its largest number then, not infinity."""
    if dtype == tl.float16:
        gradient = tl.minimum(tl.maximum(gradient, -65504.0), 65504.0)
    return gradient.to(dtype)


# From products of queries and keys to scores: soft caps, the scale by a row's own length, ALiBi's
# slopes, sigmoid's bias. All score functions take them.


@triton.jit
def log2_length(rows, value_row, limits, start_k, counts, FLAGS: tl.constexpr):
    """Return log2 of how many keys each of ``rows`` may see, 0 for none; with LOG_N1 of one more.
    ``counts``: these numbers, if there is a mask; ``value_row``: where a head's values by row
    begin; ``limits``: of ``common.attn_mask``; ``start_k``: the sequence's first key."""
    stop_q, stop_k, shift, window = limits
    if counts is not None:
        n = tl.load(counts + value_row + rows, mask=rows < stop_q, other=1.0)
    else:
        q_pos = rows + shift
        last = tl.minimum(q_pos + 1, stop_k) if CAUSAL & FLAGS else q_pos * 0 + stop_k
        first = tl.maximum(q_pos - window + 1, start_k) if WINDOWED & FLAGS else start_k
        n = (last - first).to(tl.float32)
    if LOG_N1 & FLAGS:
        n += 1
    return tl.math.log2(tl.maximum(n, 1.0))


@triton.jit
def load_s(head, s, FLAGS: tl.constexpr):
    """Return s · ln 2 of a head, the factor of log2 n; 1 without SCALED."""
    if SCALED & FLAGS:
        return tl.load(s + head) * LN_2
    else:
        return 1.0


@triton.jit
def times_s_log_n(number, s_log_n, FLAGS: tl.constexpr):
    """Return ``number``, a head's qk_scale or slope, with SCALED times s · log n of each row."""
    if SCALED & FLAGS:
        return number * s_log_n
    else:
        return number


@triton.jit
def load_slope(head, slopes, FLAGS: tl.constexpr):
    """Return the slope of a head in log2 units per key, 0 without SLOPED."""
    if SLOPED & FLAGS:
        return tl.load(slopes + head) * LOG2_E
    else:
        return 0.0


@triton.jit
def column(number):
    """Return [R, 1] for a vector of R rows; a scalar as it is."""
    if isinstance(number, tl.tensor) and len(number.shape) == 1:
        return number[:, None]
    else:
        return number


@triton.jit
def row_score_mod(
    head, rows, value_row, limits, start_k, counts, scale, bias, slopes, s, FLAGS: tl.constexpr
):
    """Return the terms of a forward pass's scores: qk_scale and slope ([R, 1], or a scalar),
    minus each row's bias [R] in log2 units, and the factor that scores still need, 1 if these two
    apply it. ``head``: of all rows, or [R]; ``scale``: from products to log2 units; other
    arguments: see :func:`log2_length`."""
    length = log2_length(rows, value_row, limits, start_k, counts, FLAGS)  # [R]
    s_log_n = load_s(head, s, FLAGS) * length
    qk_scale = times_s_log_n(scale, s_log_n, FLAGS)
    slope = times_s_log_n(load_slope(head, slopes, FLAGS), s_log_n, FLAGS)
    minus_bias = length * 0
    if bias is not None:  # sigmoid's, in log2 units; what its backward pass is given as lse
        minus_bias = minus_bias - tl.load(bias + head) * LOG2_E
    elif ELEMENTWISE & FLAGS:
        minus_bias = length
    unit = scale
    if SCORE_MOD_OR_BIAS & FLAGS:
        unit = 1.0
    return column(qk_scale), column(slope), minus_bias, unit


@triton.jit
def load_sink(head, sinks, FLAGS: tl.constexpr):
    """Return the sink of a head in log2 units, 0 if none is learned."""
    if SINK_LEARNED & FLAGS:
        return tl.load(sinks + head) * LOG2_E
    else:
        return 0.0


@triton.jit
def alibi(y, keys, q_pos, slope, bias):
    """Return the scores less (slope · (own − key) + bias).

    Both positions count from a tile's first key or query, so that distant keys, which weigh little,
    have the coarser differences, and one of the two is the same in every tile. If ``bias`` is None,
    a row's own key keeps its score to the last bit, since some score functions depend on its sign.
    """
    before = ptx.mul_rn(q_pos.to(tl.float32), slope)
    if bias is not None:
        before = before + bias
    return y + (ptx.mul_rn(keys.to(tl.float32), slope) - before)


@triton.jit
def scores_of(
    products, keys, q_pos, score_mod, FLAGS: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """Return scores in log2 units, and the argument of :func:`cap_gradient` if they are capped,
    else the products.

    Products, ``keys`` and ``q_pos`` (the queries' positions), both from the same origin, broadcast
    against each other. ``score_mod``: the factor to log2 units, the factor before the tanh, the
    slope, and the bias of sigmoid's forward pass, else None.
    """
    qk_scale, inv_softcap, slope, bias = score_mod
    tanhs = products
    if CAPPED & FLAGS:
        tanhs = tanh(products * inv_softcap, FAST)
    y = tanhs * qk_scale
    if SLOPED & FLAGS:
        y = alibi(y, keys, q_pos, slope, bias)
    elif bias is not None:
        y = y - bias
    return y, tanhs


@triton.jit
def cap_gradient(tanhs):
    """Return the factor from gradients of capped scores to those of products."""
    return 1 - tanhs * tanhs


# The same with what a row's scores have in common added up first, for the Hopper backward pass.


@triton.constexpr_function
def slope_in_lse(norm, flags):
    """Return whether what ALiBi takes from all scores of a row is added to its lse instead."""
    sloped_alone = flags & (SLOPED.value | SCALED.value) == SLOPED.value
    return sloped_alone and norm in ("softmax", "sigmoid")


@triton.jit
def scores_minus_lse(
    products, keys, q_pos, s_log_n, qk_scale, inv_softcap, slope, lse,
    NORM: tl.constexpr, FLAGS: tl.constexpr, LSE_SLOPED: tl.constexpr,
):  # fmt: skip
    """Return (scores less their row's ``lse``, both in units of log2, so that exp2 of it is a
    weight; a value with the scores' sign; the argument of :func:`cap_gradient` if they are capped).
    LSE_SLOPED: :func:`sloped_lse` was applied to ``lse``."""
    if slope_in_lse(NORM, FLAGS):
        tanhs = products
        if CAPPED & FLAGS:
            tanhs = ptx.tanh(products * inv_softcap)
        if not LSE_SLOPED:
            lse = sloped_lse(lse, q_pos, slope, NORM, FLAGS)
        return tanhs * qk_scale + (keys.to(tl.float32) * slope - lse), tanhs, tanhs
    elif SCORE_MOD & FLAGS:
        qk_scale = times_s_log_n(qk_scale, s_log_n, FLAGS)
        slope = times_s_log_n(slope, s_log_n, FLAGS)
        y, tanhs = scores_of(
            products, keys, q_pos, (qk_scale, inv_softcap, slope, None), FLAGS, True
        )
        return y - lse, y, tanhs
    else:
        return products * qk_scale - lse, products, products


@triton.jit
def sloped_lse(lse, q_pos, slope, NORM: tl.constexpr, FLAGS: tl.constexpr):
    """Return ``lse``, if :func:`slope_in_lse` plus ALiBi's term that all scores of a row share;
    ``q_pos`` counts from the first of a tile of queries."""
    if slope_in_lse(NORM, FLAGS):
        return q_pos.to(tl.float32) * slope + lse
    else:
        return lse
