"""The gradients of :mod:`qbench.attention.kernels.gluon_gradients` in two halves: what needs no
dP, and the rest. The formulas are the same; one function made of the halves would be other code for
the kernels in use.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qbench.attention.kernels.gluon_family import (
    ROWS,
    below_lse,
    compared_gradient,
    exp2,
    exponential,
    score_gradient,
)
from qbench.attention.kernels.modes import (
    BIASED,
    CAPPED,
    COMPARED,
    LEARNING,
    LEARNING_SLOPES,
    SCALED,
)
from qbench.attention.kernels.scores import cap_slope


@gluon.jit
def tile_exponentials(
    s, of_rows, behind, shaping,
    FAMILY: gl.constexpr, MODES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Of products [ROWS, ROWS] what :func:`exponential_gradients` takes; arguments as
    :func:`~qbench.attention.kernels.gluon_gradients.tile_gradients`'s."""
    lse, _, factor, _ = of_rows
    scale, inner, slope = shaping
    layout: gl.constexpr = s.type.layout
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    keys = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    products = s
    level = lse
    if COMPARED & MODES and not MASKED:
        if SCALED & MODES:
            e = exp2(s * (factor * scale)[:, None] - lse[:, None])
        else:
            level = (rows + behind).to(gl.float32) * slope
            s = s * scale + (keys.to(gl.float32) * slope)[None, :]
            e = exp2(s - (level + lse)[:, None])
    else:
        z, s, products = below_lse(
            s, (rows + behind)[:, None], keys[None, :], factor[:, None], scale, inner, slope,
            lse[:, None], FAMILY, MODES,
        )  # fmt: skip
        e = exponential(z, s, FAMILY, MODES)
    return e, s, products, level


@gluon.jit
def exponential_gradients(
    of_scores, p, sums, tilts, of_rows, behind,
    FAMILY: gl.constexpr, MODES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The other half, what tile_gradients gives; ``of_scores``: of :func:`tile_exponentials`."""
    e, s, products, level = of_scores
    _, delta, _, sign = of_rows
    layout: gl.constexpr = p.type.layout
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    keys = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    if COMPARED & MODES and not MASKED:
        if SCALED & MODES:
            ds = compared_gradient(e, s, sign[0], sign[1], p, delta[:, None], MODES)
        else:
            ds = compared_gradient(e, s, -level[:, None], 0, p, delta[:, None], MODES)
    else:
        ds = score_gradient(e, s, p, delta[:, None], FAMILY)
    if MASKED:
        ds = gl.where(keys[None, :] <= rows[:, None], ds, 0.0)
    if BIASED & MODES:  # noqa: SIM102 (constexprs)
        if LEARNING & MODES:
            sums += gl.sum(ds, 1)
    if LEARNING_SLOPES & MODES:
        ahead = (keys - behind)[None, :] - rows[:, None]
        tilts += gl.sum(ds * ahead.to(gl.float32), 1)
    if CAPPED & MODES:
        ds = ds * cap_slope(products, MODES, True)
    return ds, sums, tilts
