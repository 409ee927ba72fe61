"""What the Gluon kernels share: tiles in shared memory, and the normalizers' formulas on them."""

from __future__ import annotations

# ruff: noqa: RET503, RET505 (early returns in constexpr branches need their else in Triton, and a
# branch that does not compile returns nothing)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from qbench.attention.kernels.modes import CAPPED, NEAR, NEXT, RESHAPED, SCALED, SLOPED
from qbench.attention.kernels.scores import capped_with_slope, product
from qbench.attention.kernels.sigmoid import sigmoid
from qbench.attention.kernels.softcap import tangent_and_slope

ROWS = gl.constexpr(64)  # that a group of warps holds
BLOCK = gl.constexpr(128)  # of both groups
SMALLEST = gl.constexpr(2.0**-126)  # that is no denormal number
NO_FORMULA = gl.constexpr("this family has no formula here")


@gluon.jit
def flat(tiles, slot):
    """A slot's tile, as a matrix."""
    return tiles.index(slot).reshape([tiles.shape[3], tiles.shape[4]])


@gluon.jit
def turned(tiles, slot):
    return flat(tiles, slot).permute([1, 0])


@gluon.jit
def exp2(y):
    """Without the care for denormal numbers, which costs three more instructions."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def exponential(z, s, FAMILY: gl.constexpr, MODES: gl.constexpr):
    """E, see :func:`qbench.attention.kernels.family.recomputed`, from scores less the lse of their
    row; ``s`` has their sign."""
    if FAMILY == "rectified":
        return gl.where(s >= 0, exp2(z), 0.0)
    elif FAMILY == "softmax" or FAMILY == "softpick":
        return exp2(z)
    elif FAMILY == "sigmoid":
        return sigmoid(z, True, MODES)
    else:
        gl.static_assert(False, NO_FORMULA)


@gluon.jit
def score_gradient(e, s, p, delta, FAMILY: gl.constexpr):
    """See :func:`qbench.attention.kernels.family.score_gradient`; in softpick
    E · D, or where the score is positive E · dP − E · D, which one predicate does."""
    if FAMILY == "softpick":
        return gl.inline_asm_elementwise(
            """{
            .reg .pred positive;
            .reg .f32 product, negated;
            setp.gt.f32 positive, $2, 0f00000000;
            mul.f32 product, $1, $4;
            neg.f32 negated, product;
            @positive fma.rn.f32 product, $1, $3, negated;
            mov.f32 $0, product;
            }""",
            "=f,f,f,f,f",
            [e, s, p, delta],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
    elif FAMILY == "softmax" or FAMILY == "rectified":
        return e * (p - delta)
    elif FAMILY == "sigmoid":
        return (e - e * e) * p
    else:
        gl.static_assert(False, NO_FORMULA)


@gluon.jit
def sign_level(head_scale, MODES: gl.constexpr):
    """Of a head, a number and whether to negate: a score, ``head_scale`` · log n times a product,
    is positive where the product is above the number, which is negated or not. A score of 0 counts
    as negative, whatever the sign of ``head_scale``."""
    if SCALED & MODES:
        above = gl.where(head_scale > 0, 0.0, float("inf"))
        return gl.where(head_scale < 0, -SMALLEST, above), (head_scale < 0).to(gl.int32)
    else:
        return 0.0, 0


@gluon.jit
def compared_gradient(e, s, level, negated, p, delta, MODES: gl.constexpr):
    """:func:`score_gradient` of softpick, where scores are positive if ``s`` is above ``level``, or
    if ``negated`` where it is not, and if not SCALED, where it is above −``level``."""
    if SCALED & MODES:
        return gl.inline_asm_elementwise(
            """{
            .reg .pred positive, flipped;
            .reg .f32 product, negated;
            setp.ne.s32 flipped, $6, 0;
            setp.gt.xor.f32 positive, $2, $3, flipped;
            mul.f32 product, $1, $5;
            neg.f32 negated, product;
            @positive fma.rn.f32 product, $1, $4, negated;
            mov.f32 $0, product;
            }""",
            "=f,f,f,f,f,f,r",
            [e, s, level, p, delta, negated],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return gl.inline_asm_elementwise(
            """{
            .reg .pred positive;
            .reg .f32 product, negated;
            neg.f32 negated, $3;
            setp.gt.f32 positive, $2, negated;
            mul.f32 product, $1, $5;
            neg.f32 negated, product;
            @positive fma.rn.f32 product, $1, $4, negated;
            mov.f32 $0, product;
            }""",
            "=f,f,f,f,f,f",
            [e, s, level, p, delta],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )


@gluon.jit
def log2_length(rows, MODES: gl.constexpr):
    """See :func:`qbench.attention.kernels.scores.log2_length`, where all is causal."""
    if NEXT & MODES:
        rows += 1
    return gl.log2((rows + 1).to(gl.float32))


@gluon.jit
def reshaped(products, own, keys, factor, scale, inner, slope, MODES: gl.constexpr):
    """See :func:`qbench.attention.kernels.scores.reshaped`. ``own`` and ``keys`` count from the
    block's first; ``factor``: s · log n of each row."""
    bend = products
    if CAPPED & MODES:
        products, bend = capped_with_slope(products, inner, MODES, True)
    if SCALED & MODES:
        y = products * (factor * scale)
        slope = factor * slope
    else:
        y = products * scale
    if SLOPED & MODES:
        y = y + (product(keys.to(gl.float32), slope) - product(own.to(gl.float32), slope))
    return y, bend


@gluon.jit
def below_lse(
    products, own, keys, factor, scale, inner, slope, lse,
    FAMILY: gl.constexpr, MODES: gl.constexpr, LEVEL: gl.constexpr = False,
):  # fmt: skip
    """Scores less the lse of their row, what has the scores' sign where the family asks for it,
    and what scores.cap_slope takes where they are capped; arguments as :func:`reshaped`'s. LEVEL:
    ``lse`` has had what :func:`sloped_lse` adds."""
    if CAPPED & MODES and NEAR & MODES:  # neither SLOPED nor SCALED
        z, bend = tangent_and_slope(products, inner, scale, lse)
        return z, products, bend
    elif SLOPED & MODES and SCALED & MODES == 0:
        if FAMILY == "softmax" or FAMILY == "sigmoid":
            # What is the same in a row is added up first.
            bend = products
            if CAPPED & MODES:
                products, bend = capped_with_slope(products, inner, MODES, True)
            if not LEVEL:
                lse = own.to(gl.float32) * slope + lse
            return products * scale + (keys.to(gl.float32) * slope - lse), products, bend
        elif FAMILY == "softpick" or FAMILY == "rectified":
            s, bend = reshaped(products, own, keys, factor, scale, inner, slope, MODES)
            return s - lse, s, bend
        else:
            gl.static_assert(False, NO_FORMULA)
    elif RESHAPED & MODES:
        s, bend = reshaped(products, own, keys, factor, scale, inner, slope, MODES)
        return s - lse, s, bend
    else:
        return products * scale - lse, products, products


@gluon.jit
def sloped_lse(lse, own, slope, FAMILY: gl.constexpr, MODES: gl.constexpr):
    """The lse of rows with what ALiBi takes from all scores of a row; ``own`` counts from the first
    of a tile of queries."""
    if SLOPED & MODES and SCALED & MODES == 0:
        if FAMILY == "softmax" or FAMILY == "sigmoid":
            return own.to(gl.float32) * slope + lse
        elif FAMILY == "softpick" or FAMILY == "rectified":
            return lse
        else:
            gl.static_assert(False, NO_FORMULA)
    else:
        return lse


@gluon.jit
def store_rows(out, sums, first, batch, head, strides):
    """Stores ``sums`` [ROWS, HEAD_DIM]; ``strides``: of batch row, head and row."""
    rows = first + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, sums.type.layout))
    columns = gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, sums.type.layout))
    pointers = out + batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    pointers = pointers + rows.to(gl.int64)[:, None] * strides[2] + columns[None, :]
    gl.store(pointers, sums.to(gl.bfloat16))
