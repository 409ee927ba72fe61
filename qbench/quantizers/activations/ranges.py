"""The range of each layer's input over calibration text, for scales that are fixed before."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from qbench.errors import QuantizationError
from qbench.quantizers.activations.inputs import multipliers
from qbench.quantizers.calibration import Calibration
from qbench.quantizers.config import Progress

PATTERNS = 2**16  # of the upper half of a float32: sign, exponent, 7 bits of mantissa
SIGN = 2**15


class Seen:
    """What one layer took in: the two ends in full and, ``counted``, how often each bfloat16 value
    came, for which a percentile below 100 alone asks."""

    def __init__(self, device: torch.device, *, counted: bool) -> None:
        self.counts = torch.zeros(PATTERNS, dtype=torch.int64, device=device) if counted else None
        self.low = torch.tensor(torch.inf, device=device)
        self.high = torch.tensor(-torch.inf, device=device)

    def add(self, x: Tensor) -> None:
        flat = x.detach().float().reshape(-1)
        if self.counts is not None:
            upper = (flat.view(torch.int32) >> 16) & (PATTERNS - 1)
            # not bincount, which waits for the device twice
            self.counts.scatter_add_(0, upper.long(), torch.ones_like(upper, dtype=torch.int64))
        low, high = torch.aminmax(flat)
        self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)

    def range(self, percentile: float, *, symmetric: bool) -> Tensor:
        """[low, high], float32: what ``percentile`` per cent of the values lie within.

        100 gives the smallest and the largest value. Below it, ends are rounded towards 0 to
        bfloat16's next value, at most 0.8 % away. ``symmetric``: of magnitudes.
        """
        if percentile == 100:
            if symmetric:
                high = torch.maximum(-self.low, self.high)
                return torch.stack([-high, high])
            return torch.stack([self.low, self.high])
        assert self.counts is not None, "a percentile below 100 needs what was counted"
        positive, negative = self.counts[:SIGN].double(), self.counts[SIGN:].double()
        if symmetric:
            high = _at(positive + negative, percentile / 100)
            return torch.stack([-high, high])
        ordered = torch.cat([negative.flip(0), positive])  # −∞ … −0, 0 … ∞
        tail = (1 - percentile / 100) / 2
        below, above = _index(ordered, tail), _index(ordered, 1 - tail)
        values = torch.cat([-_values(ordered.device).flip(0), _values(ordered.device)])
        return torch.stack([values[below], values[above]])


@torch.no_grad()
def ranges(
    model: nn.Module,
    calibration: Calibration,
    *,
    percentile: float,
    symmetric: bool,
    spared: tuple[str, ...],
    progress: Progress,
) -> dict[str, Tensor]:
    """By module: [low, high] of its inputs over the calibration text, one sample at a time."""
    leader: dict[str, str] = {}
    seen: dict[str, Seen] = {}
    with ExitStack() as stack:
        last: list[tuple[weakref.ref[Tensor], str]] = []

        def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def look(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
                x = arguments[0]
                if last and last[0][0]() is x:  # q, k and v take in one tensor
                    leader[name] = last[0][1]
                    return
                last[:] = [(weakref.ref(x), name)]
                leader[name] = name
                if x.numel():
                    seen.setdefault(name, Seen(x.device, counted=percentile < 100)).add(x)

            return look

        for name, module in multipliers(model, spared).items():
            stack.callback(module.register_forward_pre_hook(watch(name)).remove)
        device = next(model.parameters()).device
        for number, ids in enumerate(calibration.ids):
            progress("ranges", number / calibration.samples)
            model(input_ids=ids[None].to(device), use_cache=False)
    found = {name: s.range(percentile, symmetric=symmetric) for name, s in seen.items()}
    for name, ends in found.items():
        if not ends.isfinite().all():
            raise QuantizationError(f"{name}: its inputs on calibration text are not finite")
    if silent := [name for name in multipliers(model, spared) if leader.get(name) not in found]:
        raise QuantizationError(f"{silent[0]}: calibration text never reaches it; add text")
    return {name: found[first].clone() for name, first in leader.items()}


def _at(counts: Tensor, share: float) -> Tensor:
    return _values(counts.device)[_index(counts, share)]


def _index(counts: Tensor, share: float) -> Tensor:
    """Of the value that at least ``share`` of all lie at or below."""
    total = counts.cumsum(0)
    return torch.searchsorted(total, share * total[-1]).clamp(max=len(counts) - 1)


def _values(device: torch.device) -> Tensor:
    """Of the patterns of positive bfloat16 values, in order: float32 [2^15]."""
    return (torch.arange(SIGN, dtype=torch.int32, device=device) << 16).view(torch.float32)
