"""tanh of scores that are small beside their soft cap, by additions and products.

The instruction for tanh takes as long as an exponential, and of these a multiprocessor does an
eighth as many a clock as additions. tanh(x) = x · P(x² − 1/8) with P of degree 1 is right to 2.5e-4
of itself for x² < 1/8, twice as close as the instruction, and 1 − tanh²(x) is as simple, to 1.3e-3.
Where one of LANES scores of a thread is beyond that, all of them get the instruction: the sign of
x² − 1/8 says so.
"""

from __future__ import annotations

import triton
import triton.language as tl

LANES = 16
LIMIT = tl.constexpr(0.125)
# Minimax in relative error, by iteratively reweighted least squares: of tanh(x) / x and of its
# derivative, from the lowest, in x² − LIMIT.
C0, C1 = tl.constexpr(0.96007942), tl.constexpr(-0.31739094)
D0, D1 = tl.constexpr(0.88362069), tl.constexpr(-0.92105735)


def _assembly(gradient: bool, lanes: int = LANES) -> str:
    """Operands: results, and with ``gradient`` as many of 1 − tanh²; products; with ``gradient``
    what is taken from each result; and LANES times each: minus the limit, both polynomials'
    coefficients, what products are multiplied by before the tanh, and the tanh after it."""
    first = lanes * (1 + gradient)
    last = first + lanes * gradient
    limit, c0, c1, d0, d1, inner, factor = (f"${last + lanes * (1 + i)}" for i in range(7))
    near, far = "", ""
    for i in range(lanes):
        x = f"${first + i}"
        near += f"""
        fma.rn.f32 q{i}, {x}, {x}, {limit};
        mov.b32 bits, q{i};
        {"and.b32 signs, signs, bits" if i else "mov.b32 signs, bits"};
        fma.rn.f32 t{i}, {c1}, q{i}, {c0};"""
        far += f"""
        mul.f32 x, {x}, {inner};
        tanh.approx.f32 x, x;"""
        if gradient:
            near += f"""
        neg.f32 x, ${last + i};
        fma.rn.f32 t{i}, t{i}, {x}, x;
        fma.rn.f32 q{i}, {d1}, q{i}, {d0};"""
            far += f"""
        neg.f32 q{i}, x;
        fma.rn.f32 q{i}, q{i}, x, 0f3F800000;
        neg.f32 t{i}, ${last + i};
        fma.rn.f32 t{i}, x, {factor}, t{i};"""
        else:
            near += f"\n        mul.f32 t{i}, t{i}, {x};"
            far += f"\n        mul.f32 t{i}, x, {factor};"
    stored = "".join(f"\n        mov.f32 ${i}, t{i};" for i in range(lanes))
    if gradient:
        stored += "".join(f"\n        mov.f32 ${lanes + i}, q{i};" for i in range(lanes))
    return f"""{{
        .reg .f32 q<{lanes}>, t<{lanes}>, x;
        .reg .b32 signs, bits;
        .reg .pred some;{near}
        setp.ge.s32 some, signs, 0;
        @!some bra near;{far}
    near:{stored}
    }}"""


VALUE, BOTH = tl.constexpr(_assembly(False)), tl.constexpr(_assembly(True))
OF_VALUE = tl.constexpr(",".join(["=f"] * LANES + ["f"] * (8 * LANES)))
OF_BOTH = tl.constexpr(",".join(["=f"] * (2 * LANES) + ["f"] * (9 * LANES)))
PACK = tl.constexpr(LANES)


@triton.jit
def tangent_near_zero(products, inner, factor):
    """``factor`` times the tanh of ``inner`` times the products; both are numbers."""
    square = inner * inner
    c0 = C0 * inner * factor
    return tl.inline_asm_elementwise(
        VALUE,
        OF_VALUE,
        [products, -LIMIT / square, c0, c0 * (C1 / C0) * square,
         D0, D1 * square, inner, factor],
        dtype=tl.float32,
        is_pure=True,
        pack=PACK,
    )  # fmt: skip


@triton.jit
def tangent_and_slope(products, inner, factor, level):
    """The same less ``level``, and the derivative of the tanh."""
    square = inner * inner
    c0 = C0 * inner * factor
    return tl.inline_asm_elementwise(
        BOTH,
        OF_BOTH,
        [products, level, -LIMIT / square, c0, c0 * (C1 / C0) * square,
         D0, D1 * square, inner, factor],
        dtype=(tl.float32, tl.float32),
        is_pure=True,
        pack=PACK,
    )  # fmt: skip


def _exponential(lanes: int) -> str:
    """exp2 of the factor times the tanh. Operands: results, products, and ``lanes`` times each:
    minus the limit, the tanh's coefficients, what products are multiplied by before the tanh, and
    the tanh after it. Which formula is asked before any exponential, so that the assembler cannot
    move the exponentials behind a wait for a matrix product."""
    limit, c0, c1, inner, factor = (f"${lanes * (2 + i)}" for i in range(5))
    asked, near, far = "", "", ""
    for i in range(lanes):
        x = f"${lanes + i}"
        asked += f"""
        fma.rn.f32 q{i}, {x}, {x}, {limit};
        mov.b32 bits, q{i};
        {"and.b32 signs, signs, bits" if i else "mov.b32 signs, bits"};"""
        near += f"""
        fma.rn.f32 t{i}, {c1}, q{i}, {c0};
        mul.f32 t{i}, t{i}, {x};
        ex2.approx.ftz.f32 t{i}, t{i};"""
        far += f"""
        mul.f32 x, {x}, {inner};
        tanh.approx.f32 x, x;
        mul.f32 t{i}, x, {factor};
        ex2.approx.ftz.f32 t{i}, t{i};"""
    stored = "".join(f"\n        mov.f32 ${i}, t{i};" for i in range(lanes))
    return f"""{{
        .reg .f32 q<{lanes}>, t<{lanes}>, x;
        .reg .b32 signs, bits;
        .reg .pred some;{asked}
        setp.ge.s32 some, signs, 0;
        @some bra far;{near}
        bra.uni done;
    far:{far}
    done:{stored}
        }}"""


MORE_LANES = 32
EXPONENTIAL = tl.constexpr(_exponential(MORE_LANES))
OF_EXPONENTIAL = tl.constexpr(",".join(["=f"] * MORE_LANES + ["f"] * (6 * MORE_LANES)))
MORE_PACK = tl.constexpr(MORE_LANES)


@triton.jit
def tangent_exp2(products, inner, factor):
    """2 to the power of ``factor`` times the tanh of ``inner`` times the products."""
    square = inner * inner
    c0 = C0 * inner * factor
    return tl.inline_asm_elementwise(
        EXPONENTIAL,
        OF_EXPONENTIAL,
        [products, -LIMIT / square, c0, c0 * (C1 / C0) * square, inner, factor],
        dtype=tl.float32,
        is_pure=True,
        pack=MORE_PACK,
    )
