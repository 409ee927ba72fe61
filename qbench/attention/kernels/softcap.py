"""tanh of scores that are small beside their soft cap, by additions and products.

The instruction for tanh takes as long as an exponential, and of these a multiprocessor does an
eighth as many a clock as additions. tanh(x) = x · P(x² − 1/2) with P of degree 2 is right to 1.6e-4
of itself for x² < 1/2, three times as close as the instruction. Of LANES scores of a thread the
others, where there are any, get the instruction: the sign of x² − 1/2 says so.
"""

from __future__ import annotations

import triton
import triton.language as tl

LANES = 16
LIMIT = tl.constexpr(0.5)
# Minimax in relative error, by iteratively reweighted least squares.
C0, C1, C2 = tl.constexpr(0.86119166), tl.constexpr(-0.2270168), tl.constexpr(0.10057501)


def _assembly(lanes: int = LANES) -> str:
    """Operands: results, products, and LANES times each: minus the limit, P's coefficients from
    the lowest, what products are multiplied by before the tanh, and the tanh after it."""
    limit, c0, c1, c2, inner, factor = (f"${lanes * (2 + i)}" for i in range(6))
    near = "".join(
        f"""
        fma.rn.f32 q{i}, ${lanes + i}, ${lanes + i}, {limit};
        mov.b32 bits, q{i};
        {"and.b32 signs, signs, bits" if i else "mov.b32 signs, bits"};
        fma.rn.f32 t{i}, {c2}, q{i}, {c1};
        fma.rn.f32 t{i}, t{i}, q{i}, {c0};
        mul.f32 t{i}, t{i}, ${lanes + i};"""
        for i in range(lanes)
    )
    far = "".join(
        f"""
        setp.ge.f32 beyond, q{i}, 0f00000000;
        mul.f32 x, ${lanes + i}, {inner};
        tanh.approx.f32 x, x;
        mul.f32 x, x, {factor};
        @beyond mov.f32 t{i}, x;"""
        for i in range(lanes)
    )
    stored = "".join(f"\n        mov.f32 ${i}, t{i};" for i in range(lanes))
    return f"""{{
        .reg .f32 q<{lanes}>, t<{lanes}>, x;
        .reg .b32 signs, bits;
        .reg .pred some, beyond;{near}
        setp.ge.s32 some, signs, 0;
        @!some bra near;{far}
    near:{stored}
    }}"""


ASSEMBLY = tl.constexpr(_assembly())
CONSTRAINTS = tl.constexpr(",".join(["=f"] * LANES + ["f"] * (7 * LANES)))
PACK = tl.constexpr(LANES)


@triton.jit
def tangent_near_zero(products, inner, factor):
    """``factor`` times the tanh of ``inner`` times the products; both are numbers."""
    square = inner * inner
    c0 = C0 * inner * factor
    return tl.inline_asm_elementwise(
        ASSEMBLY,
        CONSTRAINTS,
        [products, -LIMIT / square, c0, c0 * (C1 / C0) * square,
         c0 * (C2 / C0) * square * square, inner, factor],
        dtype=tl.float32,
        is_pure=True,
        pack=PACK,
    )  # fmt: skip
