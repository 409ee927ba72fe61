"""Keys and values rounded to few bits, in plain PyTorch: the definition that the kernels equal.

A *group* is what shares a scale. Its scale, and where the format is asymmetric its lowest value,
are rounded to the dtype that a cache would store them in; then

- symmetric: code = round(x / s), s = max |x| / (2^(bits − 1) − 1), of as many levels on each side;
- asymmetric: code = round((x − low) / s), s = (high − low) / (2^bits − 1) (KIVI, Liu et al. 2024,
  section 3);
- fp8: code = x / s as float8 e4m3, s = max |x| / 448.

All arithmetic is in float32; what comes out has the dtype of what went in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_LARGEST = 448.0
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """``bits`` of a code; ``floating``: e4m3 instead of whole numbers; ``scale_dtype``: of scales
    and lowest values as they are stored."""

    bits: int
    floating: bool
    symmetric: bool
    scale_dtype: torch.dtype

    @property
    def largest(self) -> float:
        """Of the codes; the smallest is its negative, or 0 where asymmetric."""
        if self.floating:
            return FP8_LARGEST
        return 2.0 ** (self.bits - 1) - 1 if self.symmetric else 2.0**self.bits - 1

    @property
    def scale_bits(self) -> int:
        """Of all that is stored beside a group's codes."""
        return 8 * self.scale_dtype.itemsize * (1 if self.symmetric else 2)

    def scales(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor | None]:
        """A group's scale and, where asymmetric, its lowest value as stored, from its lowest and
        highest value; in float32."""
        if self.symmetric:
            return self._stored(self._parts(torch.maximum(high, -low))), None
        zero = self._stored(low)
        return self._stored(self._parts((high - zero).clamp(min=0))), zero

    def codes(self, x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Whole numbers, or e4m3 values, in float32; ``scale`` and ``zero`` broadcast to x."""
        shifted = x.float() if zero is None else x.float() - zero
        quotient = shifted / torch.where(scale == 0, 1.0, scale)
        if self.floating:
            return quotient.clamp(-self.largest, self.largest).to(FP8).float()
        least = -self.largest if self.symmetric else 0.0
        return quotient.round().clamp(least, self.largest)

    def values(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """What ``codes`` stand for, in float32."""
        return codes * scale if zero is None else codes * scale + zero

    def rounded(self, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """``x`` as it is read back, in its dtype."""
        scale, zero = self.scales(low.float(), high.float())
        return self.values(self.codes(x, scale, zero), scale, zero).to(x.dtype)

    def _parts(self, span: Tensor) -> Tensor:
        # by a tensor: on CUDA torch multiplies by the reciprocal of a number, which rounds twice
        return span / torch.full_like(span, self.largest)

    def _stored(self, x: Tensor) -> Tensor:
        return x.to(self.scale_dtype).float()


def by_token(x: Tensor, form: Format, group: int) -> Tensor:
    """``x`` [..., D]: ``group`` neighbouring channels of one head and token share a scale."""
    parts = x.unflatten(-1, (-1, group))
    return form.rounded(parts, parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)).flatten(
        -2
    )


def by_tensor(x: Tensor, form: Format, positions: Tensor | None, first: int) -> Tensor:
    """``x`` [B, H, T, D]: one scale for all of it but the tokens before position ``first``."""
    counted = x
    if first:
        assert positions is not None
        counted = x.masked_fill((positions < first)[:, None, :, None], 0.0)
    return form.rounded(x, counted.amin(), counted.amax())


def by_channel(x: Tensor, form: Format, positions: Tensor, first: int, group: int) -> Tensor:
    """``x`` [B, H, T, D]: ``group`` tokens of one sequence, head and channel share a scale.

    ``positions`` [B or 1, T]: each token's index in its sequence. Groups are counted from position
    ``first`` on. Tokens whose group is not whole come out as they are.
    """
    numbers, whole = channel_groups(positions, first, group)
    count = int(numbers.max()) + 1 if numbers.numel() else 1
    batch, heads, _, width = x.shape
    index = numbers[:, None, :, None].expand(batch, heads, -1, width)
    empty = x.new_zeros(batch, heads, count, width)
    low, high = (
        empty.scatter_reduce(2, index, x, reduce, include_self=False).gather(2, index)
        for reduce in ("amin", "amax")
    )
    return torch.where(whole[:, None, :, None], form.rounded(x, low, high), x)


def channel_groups(positions: Tensor, first: int, group: int) -> tuple[Tensor, Tensor]:
    """Of each token the number of its group in its row [B or 1, T], and whether that group is
    whole: all its tokens are there, side by side. Tokens before ``first`` have none."""
    index = torch.arange(positions.shape[1], device=positions.device)
    within = (positions - first) % group
    begins = index - within  # where the token's group would begin
    ends = begins + group - 1
    there = (positions >= first) & (begins >= 0) & (ends < positions.shape[1])
    safe = ends.clamp(0, positions.shape[1] - 1).expand_as(positions)
    whole = there & (positions.gather(1, safe) == positions + group - 1 - within)
    starts = whole & (within == 0)
    # group 0 takes what belongs to none
    return torch.where(whole, starts.cumsum(1), 0), whole
