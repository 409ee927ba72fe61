"""The gradients of a tile's scores in Gluon, queries × keys."""

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
def tile_gradients(
    s, p, sums, tilts, of_rows, behind, shaping,
    FAMILY: gl.constexpr, MODES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Gradients of products [ROWS, ROWS] from products and dP; ``sums`` and ``tilts`` [ROWS]: plus
    what a bias's gradient is the sum of, and those of scores times how far the key is ahead, for
    the slopes'. ``of_rows``: their lse, D, s · log n [ROWS] each, and what :func:`sign_level`
    gives; ``behind``: by how much the tile's first key is behind the group's first query;
    ``shaping``: see the keys' kernel."""
    lse, delta, factor, sign = of_rows
    scale, inner, slope = shaping
    layout: gl.constexpr = s.type.layout
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    keys = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    products = s
    if COMPARED & MODES and not MASKED:
        if SCALED & MODES:
            e = exp2(s * (factor * scale)[:, None] - lse[:, None])
            ds = compared_gradient(e, s, sign[0], sign[1], p, delta[:, None], MODES)
        else:
            level = (rows + behind).to(gl.float32) * slope
            s = s * scale + (keys.to(gl.float32) * slope)[None, :]
            e = exp2(s - (level + lse)[:, None])
            ds = compared_gradient(e, s, -level[:, None], 0, p, delta[:, None], MODES)
    else:
        z, s, products = below_lse(
            s, (rows + behind)[:, None], keys[None, :], factor[:, None], scale, inner, slope,
            lse[:, None], FAMILY, MODES,
        )  # fmt: skip
        e = exponential(z, s, FAMILY, MODES)
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
