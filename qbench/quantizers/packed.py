"""Round to nearest, and a linear layer of packed codes with a scale and a zero per group, which
GPTQ uses too: the weight of row o and column i, in group g, is ``scale[o, g] · (code[o, i] −
zero[o, g])``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qbench.quantizers.config import WeightSettings
from qbench.quantizers.linear import DequantizedLinear, Tensors
from qbench.quantizers.methods.weight_only import Rtn

# A byte holds 8 / w codes of w bits; 3 bits are a plane of 2 and a plane of 1.
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
_CODES_PER_BYTE = 8  # of the thinnest plane: rows are padded to a multiple of it


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes uint8 [out, in], each below 2^bits, into bytes uint8 [out, ⌈in / 8⌉ · bits].
    ``bits``: 2, 3, 4 or 8. A byte holds codes of 8 / bits columns that lie in / (8 / bits) apart;
    with 3 bits a plane of the lower two and one of the highest. Undo with ``unpack_codes``."""
    codes = nn.functional.pad(codes, (0, -codes.shape[1] % _CODES_PER_BYTE))
    planes, taken = [], 0
    for width in _PLANES[bits]:
        plane = (codes >> taken) & ((1 << width) - 1)
        parts = plane.chunk(8 // width, dim=1)
        byte = parts[0].clone()
        for index, part in enumerate(parts[1:], start=1):
            byte |= part << (index * width)
        planes.append(byte)
        taken += width
    return torch.cat(planes, dim=1).contiguous()


def unpack_codes(packed: Tensor, bits: int, in_features: int) -> Tensor:
    """Undo ``pack_codes``: return the codes uint8 [out, in_features]."""
    padded = -(-in_features // _CODES_PER_BYTE) * _CODES_PER_BYTE
    codes, start, taken = None, 0, 0
    for width in _PLANES[bits]:
        byte = packed[:, start : start + padded * width // 8]
        mask = (1 << width) - 1
        parts = [(byte >> (index * width)) & mask for index in range(8 // width)]
        plane = torch.cat(parts, dim=1) if len(parts) > 1 else byte
        codes = plane if codes is None else codes | (plane << taken)
        start, taken = start + byte.shape[1], taken + width
    return codes[:, :in_features]


class PackedLinear(DequantizedLinear):
    """A linear layer that dequantizes packed codes. ``codes`` uint8 [out, in · bits / 8], ``scale``
    float16 [out, groups], ``zero`` uint8 [out, groups], ``order`` int32 [in] or None: column i of
    the weight is column order[i] of the grouped codes (GPTQ's desc_act). ``compute_dtype``: dtype
    that a dequantized weight is rounded to before it is cast to ``dtype``."""

    compute_dtype = torch.float32

    def __init__(self, layer: nn.Linear, tensors: Tensors, settings: WeightSettings) -> None:
        super().__init__(layer, tensors, settings)
        if "order" not in tensors:
            self.register_buffer("order", None)
        self.bits, self.group_size = settings.num_bits, settings.group_length(layer.in_features)

    def dequantize(self) -> Tensor:
        """Return the weight, ``dtype`` [out, in], with its columns in the order of the inputs."""
        codes = unpack_codes(self.codes, self.bits, self.in_features)
        groups = codes.reshape(self.out_features, -1, self.group_size).float()
        weight = (groups - self.zero[..., None].float()) * self.scale[..., None].float()
        weight = weight.reshape(self.out_features, self.in_features)
        if self.order is not None:
            weight = weight[:, self.order]
        return weight.to(self.compute_dtype).to(self.dtype)

    def groups(self, weight: Tensor, settings: WeightSettings) -> Tensor:
        """Return a matrix [out, in] as [groups, weights of a group], in the order of the codes."""
        if self.order is not None:
            weight = weight[:, torch.argsort(self.order.long()).to(weight.device)]
        return super().groups(weight, settings)


def grid(weight: Tensor, bits: int, *, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Return scale and zero, float32 [..., 1], for groups of weights float32 [..., group]. The
    levels cover [min(w, 0), max(w, 0)], or ±max|w| with the zero in the middle, as in the code of
    the GPTQ paper. Scales are rounded to float16, as they are stored."""
    low = weight.amin(-1, keepdim=True).clamp(max=0)
    high = weight.amax(-1, keepdim=True).clamp(min=0)
    steps = 2**bits - 1
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scale = ((high - low) / steps).half().float()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # a group of zeros
    zero = torch.full_like(scale, 2 ** (bits - 1)) if symmetric else torch.round(-low / scale)
    return scale, zero.clamp(0, steps)


def nearest(weight: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Return the codes, float32, whose levels are nearest to ``weight``. ``scale`` and ``zero`` are
    broadcast to its shape; codes are 0 to 2^``bits`` − 1."""
    return (torch.round(weight / scale) + zero).clamp_(0, 2**bits - 1)


def pack(codes: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensors:
    """Return the tensors to store: ``codes`` float32 [out, in] packed, scale float16 and zero uint8
    [out, groups]."""
    return {
        "codes": pack_codes(codes.to(torch.uint8), bits),
        "scale": scale.half().contiguous(),
        "zero": zero.to(torch.uint8).contiguous(),
    }


def quantize(name: str, layer: nn.Linear, settings: Rtn) -> Tensors:
    """Round the weight of ``layer`` to nearest; return the tensors of ``pack``."""
    weight = layer.weight.detach().float()
    groups = weight.view(layer.out_features, -1, settings.group_length(layer.in_features))
    scale, zero = grid(groups, settings.num_bits, symmetric=settings.symmetric)
    codes = nearest(groups, scale, zero, settings.num_bits).view_as(weight)
    return pack(codes, scale[..., 0], zero[..., 0], settings.num_bits)


from_packed = PackedLinear
