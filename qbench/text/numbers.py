"""Numbers and names as papers print them."""

from __future__ import annotations

import math

MINUS = "−"
NO_VALUE = "—"


def number(value: float | None, *, percent: bool, signed: bool = False) -> str:
    """Two decimals as the papers print them; fractions become per cent."""
    if value is None or math.isnan(value):  # ∞ − ∞
        return NO_VALUE
    if math.isinf(value):
        return f"{MINUS if value < 0 else ''}∞"
    text = f"{value * 100 if percent else value:{'+' if signed else ''}.2f}"
    if text in ("-0.00", "+0.00"):
        text = "+0.00" if signed else "0.00"
    return text.replace("-", MINUS)


def ratio(logarithm: float, *, decimals: int = 3) -> str:
    """The ratio with this natural logarithm: 1.032, with three digits where it is far from 1."""
    if logarithm > 700:  # near the largest double
        return "∞"
    value = math.exp(logarithm)
    return f"{value:.{decimals}f}" if 0.1 <= value < 100 else f"{value:.3g}".replace("-", MINUS)


def significant(value: float) -> str:
    """Four significant digits, the scale of divergences."""
    return f"{value:.4g}".replace("-", MINUS)


def metric_title(metric: str) -> str:
    """``acc_norm`` as the paper writes it: Acc Norm; a filter in brackets stays as it is."""
    if metric == NO_VALUE:
        return metric
    name, bracket, rest = metric.partition(" [")
    return name.replace("_", " ").title() + bracket + rest
