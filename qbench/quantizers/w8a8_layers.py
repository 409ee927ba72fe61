"""Linear layers whose products are computed in int8 or float8, and their inputs.

int8: torch's own integer product (cuBLAS on a GPU), scaled afterwards. float8: torchao's
``Float8Tensor``, which calls torch's scaled product. Inputs are quantized by a hook, once for all
layers that share one: torchao would do it again in each layer, with scales in the model's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qbench.quantizers.activations import rounding
from qbench.quantizers.linears import Plain, Tensors
from qbench.quantizers.quantizer import Grid, Stored

LEAST_ROWS = 32  # cuBLAS takes integer products of more than 16 rows only
GRIDS = {"int8": Grid(kind="symmetric", bits=8), "fp8": Grid(kind="e4m3", bits=8)}


class Coded:
    """An input as codes [..., in] and scales float32 [..., 1]; products with it are ``dtype``."""

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scale, self.dtype = codes, scale, dtype
        self.shape = codes.shape

    def detach(self) -> Coded:
        return self

    def dequantize(self) -> Tensor:
        """float32."""
        return self.codes.float() * self.scale


def code(x: Tensor, kind: str) -> Coded:
    """``x`` [..., in], one scale a token."""
    if x.is_cuda:
        from qbench.quantizers.activations import kernel  # needs Triton

        if kernel.fits(x):
            return Coded(*kernel.coded(x, GRIDS[kind]), x.dtype)
    return Coded(*rounding.coded(x, GRIDS[kind]), x.dtype)


class LowPrecisionLinear(nn.Module):
    """``codes`` [out, in] int8 or float8 E4M3, ``scale`` float32 [out, 1].

    Its forward takes a ``Coded`` input for a product in low precision, or a tensor for one with
    the dequantized weight.
    """

    def __init__(self, shape: Plain, tensors: Tensors, kind: str, *, fast: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = shape.in_features, shape.out_features
        self.dtype, self.kind, self.fast = shape.dtype, kind, fast
        self.register_buffer("codes", tensors["codes"].contiguous())
        self.register_buffer("scale", tensors["scale"])
        self.register_buffer("bias", shape.bias)

    def dequantize(self) -> Tensor:
        return (self.codes.float() * self.scale).to(self.dtype)

    def forward(self, x: Tensor | Coded) -> Tensor:
        if not isinstance(x, Coded):
            return nn.functional.linear(x, self.dequantize().to(x.dtype), self.bias)
        rows, scale = x.codes.reshape(-1, self.in_features), x.scale.reshape(-1, 1)
        product = self._int8 if self.kind == "int8" else self._fp8
        return product(rows, scale, x.dtype).reshape(*x.shape[:-1], self.out_features)

    def _int8(self, rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        count = len(rows)
        if count < LEAST_ROWS:
            rows = nn.functional.pad(rows, (0, 0, 0, LEAST_ROWS - count))
        y = torch._int_mm(rows, self.codes.t())[:count]
        if y.is_cuda:
            from qbench.quantizers.activations import kernel  # needs Triton

            return kernel.scaled(y, scale, self.scale, self.bias, dtype)
        result = y.float() * scale * self.scale.t()
        return (result if self.bias is None else result + self.bias.float()).to(dtype)

    def _fp8(self, rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        from torchao.float8.inference import Float8MMConfig
        from torchao.quantization import Float8Tensor

        about = {
            "block_size": [1, self.in_features],
            "mm_config": Float8MMConfig(use_fast_accum=self.fast),
            "dtype": dtype,
        }
        pair = Float8Tensor(rows, scale, **about), Float8Tensor(self.codes, self.scale, **about)
        return nn.functional.linear(*pair, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, {self.kind}"


def tensors_of(weight: Tensor, kind: str) -> Tensors:
    """What is stored of ``weight`` [out, in]."""
    codes, scale = rounding.coded(weight, GRIDS[kind])
    return {"codes": codes, "scale": scale}


def read(module: LowPrecisionLinear) -> Stored:
    return Stored(
        tensors={"codes": module.codes, "scale": module.scale},
        dequantize=module.dequantize,
        groups=lambda weight: weight,
    )
