"""What a quantized input should be, found again: for the audit alone.

Nothing here is shared with what quantizes. Formats are tables of all their values, in float64.
Scales, zero points and ratios are divided in float32, as where they are computed: values of 16
bits lie on ties so often that what float64 makes of them is another code, and a block's scale
that is another changes the whole block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qbench.errors import QuantizationError
from qbench.quantizers.config import ActivationEvidence


def groups_of(x: Tensor, about: ActivationEvidence) -> Tensor:
    """[..., in] → [groups, values in a group]: values of one scale together."""
    blocks = about.grid.scale_format != "float32"  # these have scales of their own
    if about.scale_of == "group" or blocks:
        return x.reshape(-1, x.shape[-1] if about.group == -1 else about.group)
    return x.reshape(1, -1)


def expected(groups: Tensor, about: ActivationEvidence) -> tuple[Tensor, Tensor, Tensor]:
    """Of ``groups`` float64 [groups, n]: the values [groups, n] that they should become, the
    lowest and the highest that their scales, stored in float32, allow [groups or 1, 1]."""
    kind, bits = about.grid.kind, int(about.grid.bits)
    largest = groups.abs().amax(1, keepdim=True)
    given = None if about.scale is None else about.scale.double().reshape(1, 1)
    if kind == "asymmetric":
        low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True)
        span = (high.clamp(min=0) - low).float().double()
        scale = _usable(_ratio(span, 2**bits - 1) if given is None else given)
        zero = _ratio(-low, scale).round() if given is None else about.zero.double().reshape(1, 1)  # type: ignore[union-attr]
        codes = (_ratio(groups, scale).round() + zero).clamp(0, 2**bits - 1)
        return (codes - zero) * scale, -zero * scale, (2**bits - 1 - zero) * scale
    if kind == "symmetric":
        most = 2 ** (bits - 1) - 1
        scale = _usable(_ratio(largest, most) if given is None else given)
        return _ratio(groups, scale).round().clamp(-most, most) * scale, -most * scale, most * scale
    table = _table(kind).to(groups.device)
    if about.grid.scale_format == "e8m0":
        power = torch.floor(torch.log2(_usable(largest)))
        scale = torch.exp2((power - torch.floor(torch.log2(table[-1]))).clamp(min=-126))
    elif about.grid.scale_format == "e4m3":
        e4m3 = _table("e4m3").to(groups.device)
        above = torch.ones((), dtype=torch.float64, device=groups.device)
        if about.scale_of == "tensor":
            above = _usable(_ratio(_ratio(largest.max(), table[-1]), e4m3[-1]))
        elif given is not None:
            above = _usable(given)
        ratio = _ratio(_ratio(largest, table[-1]), above)
        scale = _nearest(ratio, e4m3).clamp(min=2.0**-9) * above
    else:
        scale = _ratio(largest, table[-1]) if given is None else given
    scale = _usable(scale.float().double())  # as it is stored
    return _nearest(_ratio(groups, scale), table) * scale, table[0] * scale, table[-1] * scale


def _ratio(x: Tensor, by: Tensor | float) -> Tensor:
    """x / ``by`` of float32 values, rounded to float32 once; a tensor also where ``by`` is a
    number, by whose reciprocal CUDA would multiply."""
    divisor = torch.as_tensor(by, dtype=torch.float32, device=x.device)
    return (x.float() / divisor.expand_as(x)).double()


def _table(kind: str) -> Tensor:
    """All values of a floating-point format in order, float64."""
    if kind == "e4m3":
        every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double()
        return every[every.isfinite()].unique()
    if kind != "e2m1":
        raise QuantizationError(
            f"{kind}: the audit knows symmetric, asymmetric, e4m3 and e2m1 grids of activations, "
            "and finds no other values again"
        )
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    return torch.cat([-positive, positive]).unique()


def _nearest(x: Tensor, table: Tensor) -> Tensor:
    """The values of ``table``, in order, nearest to ``x``; ties to the one of even index."""
    above = torch.searchsorted(table, x).clamp(1, len(table) - 1)
    low, high = table[above - 1], table[above]
    origin = int(torch.searchsorted(table, torch.zeros_like(table[:1])))
    up = (high - x < x - low) | ((high - x == x - low) & ((above - origin) % 2 == 0))
    return torch.where(up, high, low)


def _usable(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))
