"""σ(x) = 1 / (1 + 2^−z) of scores in units of log2, for the compiler and for the interpreter.

Exponentials and reciprocals are what a multiprocessor does slowest: an eighth as many a clock as
additions and products. With RARE of MODES reciprocals are computed only where they are needed. With
a bias of −log n nearly all e = 2^z are small, and there e / (1 + e) is e − e², right to 1e-3 of
itself, half of what bf16 rounds off, for e ≤ 1/32; only where one of LANES scores of a thread is
above that are their reciprocals computed.
"""

from __future__ import annotations

# ruff: noqa: RET505 (early returns in constexpr branches need their else in Triton)
import triton
import triton.language as tl

from qbench.attention.kernels.modes import RARE

ONE = "0f3F800000"

LANES = 16
SMALL = "0f3D000000"  # 1/32

SINGLE_ASSEMBLY = tl.constexpr(f"""{{
    .reg .f32 a;
    neg.f32 a, $1;
    ex2.approx.ftz.f32 a, a;
    add.f32 a, a, {ONE};
    rcp.approx.ftz.f32 $0, a;
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
    """1 / (1 + 2^−z). FAST is for the compiler: right to float32; with RARE to 1e-3."""
    if FAST and RARE & MODES:
        return tl.inline_asm_elementwise(
            RARE_ASSEMBLY, RARE_CONSTRAINTS, [z], dtype=tl.float32, is_pure=True, pack=RARE_PACK
        )
    elif FAST:
        return tl.inline_asm_elementwise(
            SINGLE_ASSEMBLY, "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1 / (1 + tl.math.exp2(-z))
