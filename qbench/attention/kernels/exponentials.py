"""2^y of scores by additions and products, for some of a thread's scores.

Exponentials are what a multiprocessor does slowest beside its matrix products: at heads of 64 they
take it as long as these. Of LANES scores of a thread some get the instruction and some a
polynomial: y = n + r with a whole n, 2^r by degree 3 for |r| ≤ 1/2, right to 7.5e-5 of itself, and
n added to the exponent's bits. MODES says how many, in its field EXPONENTS: 1 is none, and every
step more is STEP of them.
"""

from __future__ import annotations

# ruff: noqa: RET505 (early returns in constexpr branches need their else in Triton)
import struct

import triton
import triton.language as tl

from qbench.attention.kernels.modes import EXPONENT, EXPONENTS

LANES = 16
STEP = 4
# Minimax in relative error, by iteratively reweighted least squares; from the lowest.
COEFFICIENTS = (0.99992807, 0.69326099, 0.24261113, 0.05517167)
WHOLE = 1.5 * 2.0**23  # a number of this size has no bits for fractions: n is in its lowest

# Sigmoid's weights by e − e² need e ≤ 2^-4.5, right to 2e-3 there and better below, which n ≤ −5
# says; and n has 6 bits from −68. WHOLE + 68 is 0x4B400044: of a number in that range no other bits
# than these and the 6 lowest are set.
LOWEST_WHOLE = -68
OUTSIDE = ~0x4B400000 & ~0x3F & 0xFFFFFFFF
LARGEST = 2.0**-4.5


def word(number: float) -> str:
    """A float32 as PTX writes it."""
    return "0f" + struct.pack(">f", number).hex().upper()


def power(lane: int, y: str, offset: int = 0) -> str:
    """PTX: e of this lane is 2^y, and its t has n − offset in its lowest bits. Takes r and p."""
    c0, c1, c2, c3 = (word(c * 2.0**offset) for c in COEFFICIENTS)
    whole = word(WHOLE - offset)
    return f"""
        add.rn.f32 t{lane}, {y}, {whole};
        sub.rn.f32 r, t{lane}, {whole};
        sub.rn.f32 r, {y}, r;
        fma.rn.f32 p, r, {c3}, {c2};
        fma.rn.f32 p, p, r, {c1};
        fma.rn.f32 p, p, r, {c0};
        mov.b32 low, t{lane};
        shl.b32 low, low, 23;
        mov.b32 high, p;
        add.s32 low, low, high;
        mov.b32 e{lane}, low;"""


REGISTERS = f"""
        .reg .f32 t<{LANES}>, e<{LANES}>, w<{LANES}>, r, p;
        .reg .b32 low, high, bits;"""


def by_polynomial(count: int) -> tuple[bool, ...]:
    """Which lanes, ``count`` of them, spread evenly."""
    return tuple((lane + 1) * count // LANES > lane * count // LANES for lane in range(LANES))


def _powers(count: int) -> str:
    lines = [
        power(lane, f"${lane + LANES}") + f"\n        mov.f32 ${lane}, e{lane};"
        if polynomial
        else f"\n        ex2.approx.ftz.f32 ${lane}, ${lane + LANES};"
        for lane, polynomial in enumerate(by_polynomial(count))
    ]
    return "{" + REGISTERS + "".join(lines) + "\n    }"


def _weights(count: int) -> str:
    polynomial = by_polynomial(count)
    fast = "".join(
        power(lane, f"${lane + LANES}", LOWEST_WHOLE)
        if polynomial[lane]
        else f"\n        ex2.approx.ftz.f32 e{lane}, ${lane + LANES};"
        for lane in range(LANES)
    )
    fast += "".join(
        f"\n        neg.f32 p, e{i};\n        fma.rn.f32 w{i}, p, e{i}, e{i};" for i in range(LANES)
    )
    check = ""
    if count:
        ts = [lane for lane in range(LANES) if polynomial[lane]]
        check += "\n        mov.b32 bits, 0;"
        for lane in ts:
            check += f"\n        mov.b32 low, t{lane};\n        or.b32 bits, bits, low;"
        check += f"\n        and.b32 bits, bits, {OUTSIDE:#x};\n        setp.ne.b32 some, bits, 0;"
    plain = [f"e{lane}" for lane in range(LANES) if not polynomial[lane]]
    if plain:
        for i, name in enumerate(plain):
            to = f"m{i % 4}"
            check += (
                f"\n        max.f32 {to}, {to}, {name};"
                if i > 3
                else f"\n        mov.f32 {to}, {name};"
            )
        for one, other in (("m0", "m1"), ("m2", "m3"), ("m0", "m2")):
            check += f"\n        max.f32 {one}, {one}, {other};"
        larger = f"setp.gt{'.or' if count else ''}.f32 some, m0, {word(LARGEST)}"
        check += f"\n        {larger}{', some' if count else ''};"
    slow = "".join(
        f"""
        neg.f32 p, ${lane + LANES};
        ex2.approx.ftz.f32 p, p;
        add.f32 p, p, {word(1.0)};
        rcp.approx.ftz.f32 w{lane}, p;"""
        for lane in range(LANES)
    )
    stored = "".join(f"\n        mov.f32 ${lane}, w{lane};" for lane in range(LANES))
    return f"""{{{REGISTERS}
        .reg .f32 m<4>;
        .reg .pred some;{fast}{check}
        @!some bra small;{slow}
    small:{stored}
    }}"""


CONSTRAINTS = tl.constexpr(",".join(["=f"] * LANES + ["f"] * LANES))
PACK = tl.constexpr(LANES)
POWERS_8, POWERS_12, POWERS_16 = (tl.constexpr(_powers(count)) for count in (8, 12, 16))
WEIGHTS_0, WEIGHTS_8 = tl.constexpr(_weights(0)), tl.constexpr(_weights(8))
WEIGHTS_12, WEIGHTS_16 = tl.constexpr(_weights(12)), tl.constexpr(_weights(16))


@triton.jit
def powers(y, MODES: tl.constexpr):
    """2^y for |y| < 126, in bf16's precision; for the compiler."""
    if MODES & EXPONENTS == 3 * EXPONENT:
        return tl.inline_asm_elementwise(
            POWERS_8, CONSTRAINTS, [y], dtype=tl.float32, is_pure=True, pack=PACK
        )
    elif MODES & EXPONENTS == 4 * EXPONENT:
        return tl.inline_asm_elementwise(
            POWERS_12, CONSTRAINTS, [y], dtype=tl.float32, is_pure=True, pack=PACK
        )
    elif MODES & EXPONENTS == 5 * EXPONENT:
        return tl.inline_asm_elementwise(
            POWERS_16, CONSTRAINTS, [y], dtype=tl.float32, is_pure=True, pack=PACK
        )
    else:
        return tl.math.exp2(y)


@triton.jit
def small_weights(z, MODES: tl.constexpr):
    """1 / (1 + 2^−z) to 2e-3 of itself, where a thread's LANES are all small without a
    reciprocal; for the compiler."""
    if MODES & EXPONENTS == EXPONENT:
        return tl.inline_asm_elementwise(
            WEIGHTS_0, CONSTRAINTS, [z], dtype=tl.float32, is_pure=True, pack=PACK
        )
    elif MODES & EXPONENTS == 3 * EXPONENT:
        return tl.inline_asm_elementwise(
            WEIGHTS_8, CONSTRAINTS, [z], dtype=tl.float32, is_pure=True, pack=PACK
        )
    elif MODES & EXPONENTS == 4 * EXPONENT:
        return tl.inline_asm_elementwise(
            WEIGHTS_12, CONSTRAINTS, [z], dtype=tl.float32, is_pure=True, pack=PACK
        )
    else:
        return tl.inline_asm_elementwise(
            WEIGHTS_16, CONSTRAINTS, [z], dtype=tl.float32, is_pure=True, pack=PACK
        )
