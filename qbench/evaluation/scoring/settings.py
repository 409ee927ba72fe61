"""What a language model is asked to do; every field can change a score or what is reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from qbench.evaluation.tolerance import Tolerance

Mode = Literal["exact", "fast", "lm-eval"]

# HFLM scores move with the batch size, so "auto" is a constant and not a measurement.
AUTO_BATCH_SIZE = {"cuda": 64, "cpu": 8}
AUTO_WINDOW_BATCH_SIZE = {"cuda": 8, "cpu": 1}
AUTO_BATCH_TOKENS = {"cuda": 32_768, "cpu": 2_048}
AUTO_SAMPLE = {"cuda": 32, "cpu": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one language model; sizes are resolved, none is "auto" any more.

    ``batch_size`` counts requests, ``window_batch_size`` rolling windows of up to ``max_length``
    tokens, ``batch_tokens`` the tokens of a packed batch (fast mode only): the most, where
    ``measure_memory`` lets the device's memory decide. ``sample`` counts the documents of each
    call on which fast scoring is compared with exact, within ``tolerance``.
    ``shuffle`` seeds another order of batches than longest first, to see what order alone does.
    """

    mode: Mode
    batch_size: int
    window_batch_size: int
    batch_tokens: int
    measure_memory: bool
    max_length: int
    add_bos: bool
    softmax_dtype: Literal["float32", "model"]
    tolerance: Tolerance
    sample: int
    seed: int
    shuffle: int | None = None

    def policy(self) -> dict[str, Any]:
        """The part that decides how requests are batched, for the record."""
        policy: dict[str, Any] = {"mode": self.mode, "softmax_dtype": self.softmax_dtype}
        if self.shuffle is not None:
            policy["shuffle"] = self.shuffle
        if self.mode == "fast":
            return policy | {"batching": "packed", "batch_tokens": self.batch_tokens}
        return policy | {
            "batching": "padded, longest first",
            "batch_size": self.batch_size,
            "window_batch_size": self.window_batch_size,
        }
