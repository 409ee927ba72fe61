"""A tile's weights and the gradients of its scores in Gluon, keys × queries."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qbench.attention.kernels.family import expm1_near_zero, rounded
from qbench.attention.kernels.gluon_family import (
    NO_FORMULA,
    ROWS,
    below_lse,
    compared_gradient,
    exp2,
    exponential,
    score_gradient,
)
from qbench.attention.kernels.modes import CAPPED, COMPARED, RESHAPED, SCALED
from qbench.attention.kernels.scores import cap_slope


@gluon.jit
def seen_by(step, layout: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Which of a group's keys each query of a tile sees; ``step``: of the tiles on the diagonal,
    counted from the last query."""
    keys = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(0, layout))
    return keys[:, None] <= (ROWS - (step + 1) * BLOCK_Q + columns)[None, :]


@gluon.jit
def tile_weights(
    s, stat, step, behind, shaping, left: gl.constexpr,
    FAMILY: gl.constexpr, MODES: gl.constexpr, PRECISE: gl.constexpr, MASKED: gl.constexpr,
    BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """The weights of products [ROWS, BLOCK_Q] as an operand in the layout ``left``; and what
    :func:`weighed_gradients` takes. ``stat``: the tile's, by the queries' kernel; ``behind``: by
    how much the group's first key is behind the tile's first query; ``shaping``: what products are
    multiplied by, and before a soft cap's tanh, the slope, and what sign_level gives."""
    scale, inner, slope, _ = shaping
    layout: gl.constexpr = s.type.layout
    column_layout: gl.constexpr = gl.SliceLayout(0, layout)
    keys = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, BLOCK_Q, layout=column_layout)
    lse = stat.slice(0, BLOCK_Q).load(column_layout)  # [BLOCK_Q]
    factor = 1.0
    if SCALED & MODES:
        factor = stat.slice(3 * BLOCK_Q, BLOCK_Q).load(column_layout)[None, :]
    products = s
    if COMPARED & MODES and not (MASKED or PRECISE):
        if SCALED & MODES:
            e = exp2(s * factor - lse[None, :])
        else:
            sloped = stat.slice(3 * BLOCK_Q, BLOCK_Q).load(column_layout)
            s = (s * scale + ((keys - behind).to(gl.float32) * slope)[:, None]) - sloped[None, :]
            e = exp2(s)
    else:
        z, s, products = below_lse(
            s, columns[None, :], (keys - behind)[:, None], factor, scale, inner, slope,
            lse[None, :], FAMILY, MODES, True,
        )  # fmt: skip
        e = exponential(z, s, FAMILY, MODES)
    if FAMILY == "softpick":
        floor = stat.slice(BLOCK_Q, BLOCK_Q).load(column_layout)
        above = e - floor[None, :]
        if PRECISE:
            y = s
            if RESHAPED & MODES == 0:
                y = s * scale
            above = gl.where(gl.abs(y) < 0.25, floor[None, :] * expm1_near_zero(y), above)
    elif FAMILY == "softmax" or FAMILY == "rectified" or FAMILY == "sigmoid":
        above = e
    else:
        gl.static_assert(False, NO_FORMULA)
    if MASKED:
        above = gl.where(seen_by(step, layout, BLOCK_Q), above, 0.0)
    weight = gl.convert_layout(rounded(above, gl.bfloat16, FAMILY, True), left)
    return weight, (e, s, products, lse, factor)


@gluon.jit
def weighed_gradients(
    of_scores, p, stat, step, shaping,
    FAMILY: gl.constexpr, MODES: gl.constexpr, PRECISE: gl.constexpr, MASKED: gl.constexpr,
    BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Gradients of a tile's products [ROWS, BLOCK_Q] from dP and what :func:`tile_weights` gives,
    whose arguments the others are."""
    e, s, products, lse, factor = of_scores
    sign = shaping[3]
    layout: gl.constexpr = p.type.layout
    delta = stat.slice(2 * BLOCK_Q, BLOCK_Q).load(gl.SliceLayout(0, layout))
    if SCALED & MODES:  # as D has been: a product and a difference are one instruction
        p = p * factor
    if COMPARED & MODES and not (MASKED or PRECISE):
        if SCALED & MODES:
            ds = compared_gradient(e, s, sign[0], sign[1], p, delta[None, :], MODES)
        else:  # scores less lse, above that of 0
            ds = compared_gradient(e, s, lse[None, :], 0, p, delta[None, :], MODES)
    else:
        ds = score_gradient(e, s, p, delta[None, :], FAMILY)
    if CAPPED & MODES:
        ds = ds * cap_slope(products, MODES, True)
    if MASKED:
        ds = gl.where(seen_by(step, layout, BLOCK_Q), ds, 0.0)
    return ds
