"""How single values stand in tables of analyses."""

from __future__ import annotations

import math

from qbench.text import NO_VALUE, number


def value_text(value: float | None, form: str) -> str:
    return NO_VALUE if value is None else form.format(value).replace("-", "−")


def per_cent_text(logarithm: float | None) -> str:
    """A ratio's logarithm as a change in per cent."""
    if logarithm is None:
        return NO_VALUE
    if logarithm > 20:
        return "∞"
    return f"{number(math.expm1(logarithm), percent=True, signed=True)} %"
