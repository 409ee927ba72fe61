"""σ(x) = 1 / (1 + 2^−z) of scores in units of log2, for the compiler and for the interpreter.

Exponentials and reciprocals are what a multiprocessor does slowest: an eighth as many a clock as
additions. With a bias of −log n nearly all e = 2^z are small, and there e / (1 + e) is e − e²,
right to 1e-3 of itself, half of what bf16 rounds off, for e ≤ 1/32. Only where one of LANES scores
of a thread is above that are their reciprocals computed.
"""

from __future__ import annotations

# ruff: noqa: RET505 (early returns in constexpr branches need their else in Triton)
import triton
import triton.language as tl

LANES = 16
SMALL, ONE = "0f3D000000", "0f3F800000"  # 1/32 and 1


def _assembly() -> str:
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


ASSEMBLY = tl.constexpr(_assembly())
CONSTRAINTS = tl.constexpr(",".join(["=f"] * LANES + ["f"] * LANES))
PACK = tl.constexpr(LANES)


@triton.jit
def sigmoid(z, FAST: tl.constexpr):
    """1 / (1 + 2^−z), right to 1e-3 of itself where FAST."""
    if FAST:
        return tl.inline_asm_elementwise(
            ASSEMBLY, CONSTRAINTS, [z], dtype=tl.float32, is_pure=True, pack=PACK
        )
    else:
        return 1 / (1 + tl.math.exp2(-z))
