"""Round weights to codes times scales: int8 and FP8 per row or matrix, NVFP4 and MX in blocks, by
the arithmetic of compressed-tensors' ``calculate_qparams`` and in its layouts. MX scales are
rounded up if the largest magnitude of a block would be 1.75 times a power of two or more."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qbench.quantizers.fake_quant import divided, encode, nearest, two_to
from qbench.quantizers.formats import ELEMENTS, LEAST_EXPONENT, WHOLE_ROW
from qbench.quantizers.linear import DequantizedLinear, Tensors
from qbench.quantizers.methods.weight_formats import RoundedWeights

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitude of a code's lower three bits
BIAS = 127  # of an exponent that is stored as a scale
LEAST_SCALE = 0.125  # E4M3 scale of a block of zeros, as in compressed-tensors
LEAST_MAGNITUDE = 1e-35  # of a matrix; the scale of a smaller one would be infinite
UP = 1 << 21  # a quarter of the mantissa of float32: it carries from 1.75 on


class ScaledLinear(DequantizedLinear):
    """A linear layer of ``codes`` int8 or float8_e4m3fn [out, in], or uint8 [out, in / 2], two E2M1
    codes per byte, the first in its lower half. ``scale``: float32 [out, 1] or [1, 1]; for blocks
    of a row float8_e4m3fn, to be divided by ``tensor_scale`` float32 [1], or a uint8 exponent."""

    def __init__(self, layer: nn.Linear, tensors: Tensors, settings: RoundedWeights) -> None:
        super().__init__(layer, tensors, settings)
        if self.codes.dtype == torch.uint8:
            levels = torch.tensor([*E2M1, *(-x for x in E2M1)], device=self.codes.device)
            self.register_buffer("levels", levels)

    def dequantize(self) -> Tensor:
        """Return the weight, ``dtype`` [out, in]: codes times scales, in float32."""
        scale = self.scale.float()
        if self.scale.dtype == torch.uint8:
            scale = two_to(self.scale.int() - BIAS)
        elif "tensor_scale" in self.stored:
            scale = scale / self.tensor_scale
        codes = self.codes
        if codes.dtype == torch.uint8:
            codes = self.levels[torch.stack([codes & 15, codes >> 4], -1).int()].flatten(1)
        blocks = codes.float().unflatten(1, (scale.shape[1], -1))
        return (blocks * scale[..., None]).flatten(1).to(self.dtype)

    def groups(self, weight: Tensor, settings: RoundedWeights) -> Tensor:
        """Return a matrix [out, in] as [groups, weights of a group], one row per scale."""
        return weight.reshape(self.scale.numel(), -1)


def quantize(name: str, layer: nn.Linear, settings: RoundedWeights) -> Tensors:
    """Return the tensors of a ``ScaledLinear``: the weight of ``layer`` rounded to nearest in the
    settings' format, as ``codes`` and ``scale``, for NVFP4 also ``tensor_scale``."""
    if settings.format.group_size == WHOLE_ROW:
        codes, scale = encode(layer.weight.detach(), settings.format)
        return {"codes": codes, "scale": scale}
    blocks = layer.weight.detach().float().unflatten(1, (-1, settings.format.group_size))
    magnitude, element = blocks.abs().amax(-1), ELEMENTS[settings.format.element]
    if settings.name == "nvfp4":
        largest = magnitude.amax().clamp(min=LEAST_MAGNITUDE).view(1)
        tensor_scale = largest.reciprocal() * (ELEMENTS["e4m3"].largest * element.largest)
        scale = (tensor_scale * divided(magnitude, element.largest)).to(torch.float8_e4m3fn)
        scale = torch.where(scale.float() == 0, LEAST_SCALE, scale.float()).to(scale.dtype)
        tensors = {"scale": scale, "tensor_scale": tensor_scale}
        factor = scale.float() / tensor_scale
    else:
        raised = ((magnitude.view(torch.int32) + UP) >> 23 & 255) - BIAS - element.highest
        exponent = raised.clamp(min=LEAST_EXPONENT)
        tensors, factor = {"scale": (exponent + BIAS).to(torch.uint8)}, two_to(exponent)
    codes = nearest(blocks / factor[..., None], element).flatten(1)
    return {"codes": _packed(codes) if settings.num_bits == 4 else codes.to(torch.float8_e4m3fn),
            **tensors}  # fmt: skip


def _packed(values: Tensor) -> Tensor:
    """Return E2M1 values [out, in] as codes, two to a byte, uint8 [out, in / 2]."""
    magnitudes = torch.tensor(E2M1, device=values.device)
    codes = torch.bucketize(values.abs(), magnitudes) + 8 * (values < 0)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)


from_packed = ScaledLinear
