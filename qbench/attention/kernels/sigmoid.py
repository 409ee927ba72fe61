"""σ(x) = 1 / (1 + 2^−z) of scores in units of log2, for the compiler and for the interpreter.

Exponentials and reciprocals are what a multiprocessor does slowest: an eighth as many a clock as
additions and products. MODES says how they are saved: with PAIRED two scores share a reciprocal,
1/a = b · 1/(ab); with NEWTON additions and products take its place; with RARE it is computed only
where it is needed. With a bias of −log n nearly all e = 2^z are small, and there e / (1 + e) is
e − e², right to 1e-3 of itself, half of what bf16 rounds off, for e ≤ 1/32; only where one of LANES
scores of a thread is above that are their reciprocals computed.
"""

from __future__ import annotations

# ruff: noqa: RET505 (early returns in constexpr branches need their else in Triton)
import triton
import triton.language as tl

from qbench.attention.kernels.exponentials import small_weights
from qbench.attention.kernels.modes import EXPONENTS, NEWTON, PAIRED, RARE

LOWEST = "0fC27C0000"  # −63: below it the product of two denominators is no number any more
ONE = "0f3F800000"
GUESS = "0x7EF31000"  # less its bits, of a number: its reciprocal to 5 %

LANES = 16
SMALL = "0f3D000000"  # 1/32

PAIRED_ASSEMBLY = tl.constexpr(f"""{{
    .reg .f32 a, b, r;
    max.f32 a, $2, {LOWEST};
    max.f32 b, $3, {LOWEST};
    neg.f32 a, a;
    neg.f32 b, b;
    ex2.approx.ftz.f32 a, a;
    ex2.approx.ftz.f32 b, b;
    add.f32 a, a, {ONE};
    add.f32 b, b, {ONE};
    mul.f32 r, a, b;
    rcp.approx.ftz.f32 r, r;
    mul.f32 $0, r, b;
    mul.f32 $1, r, a;
    }}""")
SINGLE_ASSEMBLY = tl.constexpr(f"""{{
    .reg .f32 a;
    neg.f32 a, $1;
    ex2.approx.ftz.f32 a, a;
    add.f32 a, a, {ONE};
    rcp.approx.ftz.f32 $0, a;
    }}""")
NEWTON_ASSEMBLY = tl.constexpr(f"""{{
    .reg .f32 a, y, t;
    .reg .b32 i;
    max.f32 a, $1, {LOWEST};
    neg.f32 a, a;
    ex2.approx.ftz.f32 a, a;
    add.f32 a, a, {ONE};
    mov.b32 i, a;
    sub.s32 i, {GUESS}, i;
    mov.b32 y, i;
    neg.f32 a, a;
    fma.rn.f32 t, a, y, {ONE};
    fma.rn.f32 t, t, t, t;
    fma.rn.f32 $0, y, t, y;
    }}""")


def _rare() -> str:
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


RARE_ASSEMBLY = tl.constexpr(_rare())
RARE_CONSTRAINTS = tl.constexpr(",".join(["=f"] * LANES + ["f"] * LANES))
RARE_PACK = tl.constexpr(LANES)


@triton.jit
def sigmoid(z, FAST: tl.constexpr, MODES: tl.constexpr):
    """1 / (1 + 2^−z). FAST is for the compiler: right to float32; with NEWTON, one step of order
    three from a guess at the reciprocal, to 1.3e-4 of itself; with RARE to 1e-3."""
    if FAST and EXPONENTS & MODES:
        return small_weights(z, MODES)
    elif FAST and PAIRED & MODES:
        return tl.inline_asm_elementwise(
            PAIRED_ASSEMBLY, "=f,=f,f,f", [z], dtype=tl.float32, is_pure=True, pack=2
        )
    elif FAST and NEWTON & MODES:
        return tl.inline_asm_elementwise(
            NEWTON_ASSEMBLY, "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
        )
    elif FAST and RARE & MODES:
        return tl.inline_asm_elementwise(
            RARE_ASSEMBLY, RARE_CONSTRAINTS, [z], dtype=tl.float32, is_pure=True, pack=RARE_PACK
        )
    elif FAST:
        return tl.inline_asm_elementwise(
            SINGLE_ASSEMBLY, "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1 / (1 + tl.math.exp2(-z))
