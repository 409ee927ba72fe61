"""How fast a training is, and how fast its GPU could be. Imports no torch."""

from __future__ import annotations

# TFLOP/s of a large bf16 matrix product, as measured, which the data sheet's figure is not.
PEAK = {"H200": 790.0}


def peak_tflops(hardware: str) -> float | None:
    """Of a GPU by its name; None for one that was not measured."""
    return next((rate for name, rate in PEAK.items() if name in hardware), None)


def share_of_peak(tokens_per_s: float, flops_per_token: float, hardware: str) -> float | None:
    """Model FLOP/s utilization of one GPU."""
    peak = peak_tflops(hardware)
    return None if peak is None else tokens_per_s * flops_per_token / (peak * 1e12)


def duration(seconds: float) -> str:
    """``1:02:03`` or ``4:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
