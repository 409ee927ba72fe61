"""What the compiler does not find by itself, as inline PTX for bf16 on the GPU. Everything here has
a plain form beside it in :mod:`qbench.attention.kernels.formulas`, which the interpreter takes.

Exponentials, tanh and reciprocals are what a multiprocessor does slowest: an eighth as many a clock
as additions and products. Two functions of LANES scores of a thread at once save them where nearly
all scores allow it, and fall back where one of the LANES does not.
"""

from __future__ import annotations

import triton
import triton.language as tl

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
LANES = 16
PACK = tl.constexpr(LANES)
ONE = "0f3F800000"


@triton.jit
def exp2_ftz(y):
    """Without the care for denormal numbers, which costs three more instructions."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def mul_rn(a, b):
    """a · b, rounded by itself: not added to something in one instruction. So the differences of
    what is equal are 0."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    return a * b


@triton.jit
def relu_to_bf16(x):
    """max(x, 0) of two numbers in one instruction."""
    return tl.inline_asm_elementwise(
        "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
    )


SIGMOID = tl.constexpr(f"""{{
    .reg .f32 a;
    neg.f32 a, $1;
    ex2.approx.ftz.f32 a, a;
    add.f32 a, a, {ONE};
    rcp.approx.ftz.f32 $0, a;
    }}""")
SMALL = "0f3D000000"  # 1/32


def _sigmoids() -> str:
    """Of LANES scores z. With a bias of −log n nearly all e = 2^z are small, and there e / (1 + e)
    is e − e², right to 1e-3 of itself, half of what bf16 rounds off, for e ≤ 1/32; only where one
    of them is above that are their reciprocals computed."""
    fast = "".join(
        f"""
        ex2.approx.ftz.f32 e{i}, ${i + LANES};
        neg.f32 n, e{i};
        fma.rn.f32 w{i}, n, e{i}, e{i};
        setp.gt{".or" if i else ""}.f32 some, e{i}, {SMALL}{", some" if i else ""};"""
        for i in range(LANES)
    )
    slow = "".join(
        f"""
        setp.gt.f32 large, e{i}, {SMALL};
        add.f32 d, e{i}, {ONE};
        rcp.approx.ftz.f32 d, d;
        sub.f32 d, {ONE}, d;
        @large mov.f32 w{i}, d;"""
        for i in range(LANES)
    )
    stored = "".join(f"\n        mov.f32 ${i}, w{i};" for i in range(LANES))
    return f"""{{
        .reg .f32 e<{LANES}>, w<{LANES}>, n, d;
        .reg .pred some, large;{fast}
        @!some bra small;{slow}
    small:{stored}
    }}"""


SIGMOIDS = tl.constexpr(_sigmoids())
OF_SIGMOIDS = tl.constexpr(",".join(["=f"] * LANES + ["f"] * LANES))


@triton.jit
def sigmoid(z):
    """1 / (1 + 2^−z), right to float32."""
    return tl.inline_asm_elementwise(SIGMOID, "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def sigmoid_mostly_small(z):
    """1 / (1 + 2^−z), right to 1e-3; for at least LANES scores a thread."""
    return tl.inline_asm_elementwise(
        SIGMOIDS, OF_SIGMOIDS, [z], dtype=tl.float32, is_pure=True, pack=PACK
    )


@triton.jit
def tanh(x):
    """One instruction, right to 2^-11 of itself, a quarter of what bf16 scores are."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


LIMIT = tl.constexpr(0.125)
# Minimax of tanh(x) / x in relative error, by iteratively reweighted least squares, in x² − LIMIT,
# from the lowest.
C0, C1 = tl.constexpr(0.96007942), tl.constexpr(-0.31739094)


def _tanhs() -> str:
    """Of LANES products. Operands: results, products, and LANES times each: minus the limit, the
    coefficients, what products are multiplied by before the tanh, and the tanh after it.

    tanh(x) = x · P(x² − 1/8) with P of degree 1 is right to 2.5e-4 of itself for x² < 1/8, twice as
    close as the instruction. Where one of them is beyond that, all get the instruction: the sign of
    x² − 1/8 says so."""
    limit, c0, c1, inner, factor = (f"${LANES * (2 + i)}" for i in range(5))
    near, far = "", ""
    for i in range(LANES):
        x = f"${LANES + i}"
        near += f"""
        fma.rn.f32 q{i}, {x}, {x}, {limit};
        mov.b32 bits, q{i};
        {"and.b32 signs, signs, bits" if i else "mov.b32 signs, bits"};
        fma.rn.f32 t{i}, {c1}, q{i}, {c0};
        mul.f32 t{i}, t{i}, {x};"""
        far += f"""
        mul.f32 x, {x}, {inner};
        tanh.approx.f32 x, x;
        mul.f32 t{i}, x, {factor};"""
    stored = "".join(f"\n        mov.f32 ${i}, t{i};" for i in range(LANES))
    return f"""{{
        .reg .f32 q<{LANES}>, t<{LANES}>, x;
        .reg .b32 signs, bits;
        .reg .pred some;{near}
        setp.ge.s32 some, signs, 0;
        @!some bra near;{far}
    near:{stored}
    }}"""


TANHS = tl.constexpr(_tanhs())
OF_TANHS = tl.constexpr(",".join(["=f"] * LANES + ["f"] * (6 * LANES)))


@triton.jit
def tanh_mostly_small(products, inner, factor):
    """``factor`` times the tanh of ``inner`` times the products; both are numbers."""
    square = inner * inner
    c0 = C0 * inner * factor
    return tl.inline_asm_elementwise(
        TANHS,
        OF_TANHS,
        [products, -LIMIT / square, c0, c0 * (C1 / C0) * square, inner, factor],
        dtype=tl.float32,
        is_pure=True,
        pack=PACK,
    )


@triton.jit
def softpick_ds(e, s, dp, delta):
    """E · D, or where the score is positive E · dP − E · D, which one predicate does."""
    return tl.inline_asm_elementwise(
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
        [e, s, dp, delta],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def softpick_ds_above(e, s, minus_level, dp, delta):
    """:func:`softpick_ds` where a score is positive if ``s`` is above −``minus_level``."""
    return tl.inline_asm_elementwise(
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
        [e, s, minus_level, dp, delta],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def softpick_ds_above_or_not(e, s, level, negated, dp, delta):
    """:func:`softpick_ds` where a score is positive if ``s`` is above ``level``, or if ``negated``
    where it is not."""
    return tl.inline_asm_elementwise(
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
        [e, s, level, dp, delta, negated],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
