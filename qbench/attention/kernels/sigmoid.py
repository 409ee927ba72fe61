"""σ(x) = 1 / (1 + 2^−z) of scores in units of log2, for the compiler and for the interpreter.

Exponentials and reciprocals are what a multiprocessor does slowest: an eighth as many a clock as
additions and products. With PAIRED two scores share one reciprocal, 1/a = b · 1/(ab); with NEWTON
additions and products take its place.
"""

from __future__ import annotations

# ruff: noqa: RET505 (early returns in constexpr branches need their else in Triton)
import triton
import triton.language as tl

from qbench.attention.kernels.modes import NEWTON, PAIRED

LOWEST = "0fC27C0000"  # −63: below it the product of two denominators is no number any more
ONE = "0f3F800000"
GUESS = "0x7EF31000"  # less its bits, of a number: its reciprocal to 5 %

ASSEMBLY = tl.constexpr(f"""{{
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


@triton.jit
def sigmoid(z, FAST: tl.constexpr, MODES: tl.constexpr):
    """1 / (1 + 2^−z). FAST is for the compiler: right to float32; with NEWTON in MODES, whose step
    of order three takes the place of the reciprocal, to 1.3e-4 of itself."""
    if FAST and PAIRED & MODES:
        return tl.inline_asm_elementwise(
            ASSEMBLY, "=f,=f,f,f", [z], dtype=tl.float32, is_pure=True, pack=2
        )
    elif FAST and NEWTON & MODES:
        return tl.inline_asm_elementwise(
            NEWTON_ASSEMBLY, "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
        )
    elif FAST:
        return tl.inline_asm_elementwise(
            SINGLE_ASSEMBLY, "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1 / (1 + tl.math.exp2(-z))
