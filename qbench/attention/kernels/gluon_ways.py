"""How the kernels of :mod:`qbench.attention.kernels.gluon_backward` go about it, by what was
measured on an H200; fixed, so that nothing is tuned while it runs."""

from __future__ import annotations

from typing import Literal, NamedTuple

from qbench.attention.kernels import FAMILIES, modes

BENT = modes.CAPPED.value | modes.SLOPED.value
BLOCK_Q = {64: 64, 128: 32}  # by head dimension, queries a tile of the keys' kernel


class Way(NamedTuple):
    """``slots`` of the pipeline; how many of the two operands that stay are ``held`` in registers,
    0.5: half of the keys, which is for "pairs". ``ahead``: with the sweep of gluon_ahead.py or of
    gluon_keys_ahead.py, or if "pairs" that of gluon_keys_pairs.py, whose slots have two tiles
    each."""

    slots: int
    held: float
    ahead: bool | Literal["pairs"] = False


# By family, head dimension and how scores are shaped, the bits of modes.RESHAPED.
PLAIN, SCALED, CAPPED, SLOPED = (
    0, modes.SCALED.value, modes.CAPPED.value, modes.SLOPED.value
)  # fmt: skip
QUERIES: dict[tuple[str, int, int], Way] = {
    ("softmax", 64, PLAIN): Way(6, 1, ahead=True),
    ("softmax", 64, SCALED): Way(6, 0, ahead=True),
    ("softmax", 64, CAPPED): Way(6, 0, ahead=True),
    ("softmax", 64, SLOPED): Way(6, 0, ahead=True),
    ("softpick", 64, PLAIN): Way(6, 1, ahead=True),
    ("softpick", 64, SCALED): Way(6, 1, ahead=True),
    ("softpick", 64, CAPPED): Way(6, 1, ahead=True),
    ("softpick", 64, SLOPED): Way(6, 0, ahead=True),
    ("rectified", 64, PLAIN): Way(6, 1, ahead=True),
}
KEYS: dict[tuple[str, int, int], Way] = {
    ("softmax", 64, PLAIN): Way(4, 0, ahead=True),
    ("softmax", 64, SCALED): Way(4, 0, ahead=True),
    ("softmax", 64, SLOPED): Way(4, 0, ahead=True),
    ("softpick", 64, SCALED): Way(6, 0, ahead=True),
    ("softpick", 64, CAPPED): Way(4, 0, ahead=True),
    ("softpick", 64, SLOPED): Way(4, 2),
    ("softmax", 128, PLAIN): Way(4, 0.5, ahead="pairs"),
    ("softmax", 128, SCALED): Way(4, 0.5, ahead="pairs"),
    ("softmax", 128, CAPPED): Way(4, 0.5, ahead="pairs"),
    ("softmax", 128, SLOPED): Way(4, 0.5, ahead="pairs"),
    ("softpick", 128, PLAIN): Way(4, 0.5, ahead="pairs"),
    ("softpick", 128, SCALED): Way(4, 0.5, ahead="pairs"),
    ("rectified", 128, PLAIN): Way(4, 0.5, ahead="pairs"),
    ("sigmoid", 128, CAPPED): Way(4, 0.5, ahead="pairs"),
    ("sigmoid", 128, SLOPED): Way(4, 0.5, ahead="pairs"),
}


def of_queries(family: str, width: int, asked: int) -> Way:
    """``asked``: bits of modes.py."""
    usual = Way(4, 2) if width == 64 else Way(4, 1)
    return QUERIES.get((family, width, asked & modes.RESHAPED.value), usual)


def of_keys(family: str, width: int, asked: int) -> Way:
    found = KEYS.get((family, width, asked & modes.RESHAPED.value))
    if found:
        return found
    slots, held = (4, 2) if width == 64 else (3, 1)
    if asked & BENT or (FAMILIES[family].near_zero and asked & modes.SCALED.value):
        held = 1  # they need the registers
    if asked & modes.NEAR.value and width == 128:
        held = 0
    return Way(slots, held)
