"""Linear layers over codes of 8 bits and scales, and products of codes by codes on hardware that
has them: int8 anywhere, fp8 on CUDA.

PyTorch's own products, without a library in between: torchao's int8 product on CUDA (0.18) formats
its input as text in every call, which waits for the GPU, and falls back to the CPU or to float32 in
silence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qbench.quantizers.config import PackedWeight
from qbench.quantizers.fake_quant import FakeQuant, decode, encode
from qbench.quantizers.formats import Scale
from qbench.quantizers.linear import DequantizedLinear, Tensors
from qbench.quantizers.weights import ScaledWeights

LEAST_ROWS = 17  # of an int8 product on CUDA


class ScaledLinear(DequantizedLinear):
    """``codes`` int8 or float8_e4m3fn [out, in], ``scale`` float32 [out, 1] or [1, 1]."""

    def dequantize(self) -> Tensor:
        return decode(self.codes, self.scale).to(self.dtype)


class ScaledMM(ScaledLinear):
    """A ``ScaledLinear`` that multiplies codes by codes, but for while ``inputs`` are paused; by
    the ``fixed`` scale of what it takes in, if there is one. A class of its own, so that an audit's
    record names what ran."""

    inputs: FakeQuant
    fixed: Scale | None

    def forward(self, x: Tensor) -> Tensor:
        if self.inputs.paused:
            return super().forward(x)
        rows = x.reshape(-1, self.in_features)
        y = scaled_mm(*encode(rows, self.inputs.form, self.fixed), self, x.dtype)
        return y.view(*x.shape[:-1], self.out_features)


# The method for weights


def quantize(name: str, layer: nn.Linear, settings: ScaledWeights) -> Tensors:
    codes, scale = encode(layer.weight.detach(), settings.format)
    return {"codes": codes, "scale": scale}


def from_packed(layer: nn.Linear, tensors: Tensors, settings: ScaledWeights) -> nn.Module:
    return ScaledLinear(layer, tensors).eval()


def unpack(module: nn.Module, settings: ScaledWeights) -> PackedWeight | None:
    if not isinstance(module, ScaledLinear):
        return None
    by_row = module.scale.numel() > 1

    def groups(weight: Tensor) -> Tensor:
        return weight if by_row else weight.reshape(1, -1)

    return PackedWeight(
        tensors={"codes": module.codes, "scale": module.scale},
        dequantize=lambda: decode(module.codes, module.scale).to(torch.float32),
        groups=groups,
    )


# Real products


def scaled_mm(codes: Tensor, scale: Tensor, layer: ScaledLinear, dtype: torch.dtype) -> Tensor:
    """``codes`` [rows, in] by the layer's, times both scales, plus its bias:
    ``dtype`` [rows, out]."""
    return (_int8 if codes.dtype == torch.int8 else _fp8)(codes, scale, layer, dtype)


def _int8(codes: Tensor, scale: Tensor, layer: ScaledLinear, dtype: torch.dtype) -> Tensor:
    rows = len(codes)
    if codes.is_cuda:  # cuBLAS takes no fewer
        codes = nn.functional.pad(codes, (0, 0, 0, max(0, LEAST_ROWS - rows)))
    y = torch._int_mm(codes, layer.codes.T)[:rows] * scale  # exact sums, times float32
    y = y * layer.scale.T
    return (y if layer.bias is None else y + layer.bias.float()).to(dtype)


def _fp8(codes: Tensor, scale: Tensor, layer: ScaledLinear, dtype: torch.dtype) -> Tensor:
    """Sums in float32: fast accumulation, which libraries choose, keeps about 14 bits of them."""
    rows, columns = scale, layer.scale
    if rows.numel() > 1 or columns.numel() > 1:  # PyTorch takes one kind of scales at a time
        rows = rows.expand(len(codes), 1).contiguous()
        columns = columns.expand(layer.out_features, 1).contiguous()
    return torch._scaled_mm(
        codes,
        layer.codes.T,
        scale_a=rows,
        scale_b=columns.T,
        bias=layer.bias,
        out_dtype=dtype,
        use_fast_accum=False,
    )
