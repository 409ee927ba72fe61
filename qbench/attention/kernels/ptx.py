"""Instructions that the compiler does not choose by itself, as inline PTX for bf16 on the GPU. Each
has a plain form in :mod:`qbench.attention.kernels.formulas`, which the interpreter runs."""

from __future__ import annotations

import triton
import triton.language as tl

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
LANES = 16
PACK = tl.constexpr(LANES)
ONE = "0f3F800000"


@triton.jit
def exp2_ftz(y):
    """Return 2^y. Denormal numbers become 0, which saves three instructions."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def mul_rn(a, b):
    """Return a · b, rounded and not fused with an addition: differences of equal products are 0."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    return a * b


@triton.jit
def relu_to_bf16(x):
    """Return max(x, 0) in bfloat16; two numbers take one instruction."""
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
    """Return PTX for the sigmoid of LANES scores z.

    With a bias of −log n nearly all e = 2^z are small, and for e ≤ 1/32 e − e² is e / (1 + e) to
    within 1e-3, half of bf16's rounding. Reciprocals are computed only if a score is above.
    """
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
    """Return 1 / (1 + 2^−z), right to the last bits of float32."""
    return tl.inline_asm_elementwise(SIGMOID, "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def sigmoid_mostly_small(z):
    """Return 1 / (1 + 2^−z), right to 1e-3, for at least LANES scores per thread."""
    return tl.inline_asm_elementwise(
        SIGMOIDS, OF_SIGMOIDS, [z], dtype=tl.float32, is_pure=True, pack=PACK
    )


@triton.jit
def tanh(x):
    """Return tanh(x) by one instruction, right to 2^-11 of itself, a quarter of bf16's rounding."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def softpick_ds(e, s, dp, delta):
    """Return E · D, or E · dP − E · D for a positive score, by one predicate."""
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
