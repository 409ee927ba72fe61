"""Products of codes by codes, on hardware that has them: int8 anywhere, fp8 on CUDA.

What a CPU multiplies goes through torchao, and so do fp8 products. Its eager int8 product on CUDA
(0.18) does not: it formats its input as text in every call, which waits for the GPU, and falls
back to the CPU or to float32 in silence; a kernel of ours stands in for it.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from qbench.errors import QuantizationError
from qbench.quantizers.activations.inputs import ATTRIBUTE, Inputs
from qbench.quantizers.activations.quantize import Fixed
from qbench.quantizers.products import codes
from qbench.quantizers.products.activations import MULTIPLE
from qbench.quantizers.products.layers import RealLinear, ScaledLinear

ENVIRONMENT = {"TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1"}  # its own kernels: none is used


class Product:
    """What multiplies the codes of one layer, its input encoded with the ``fixed`` scale if there
    is one. ``inputs`` encodes once what several layers share."""

    def __init__(self, inputs: Inputs, kind: str, fixed: Fixed | None) -> None:
        self.inputs, self.kind, self.fixed = inputs, kind, fixed

    @property
    def paused(self) -> bool:
        return self.inputs.paused

    def __call__(self, x: Tensor, layer: ScaledLinear) -> Tensor:
        y = multiply(self.kind, self.inputs.once(x, self.fixed), layer, x.dtype)
        return y.view(*x.shape[:-1], layer.out_features)


def install(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    kind: str,
    per: str,
    fixed: Mapping[str, Fixed],
) -> None:
    """Let ``modules`` of ``model`` multiply codes of ``kind`` (int8, e4m3) by codes, their inputs
    encoded ``per`` row or tensor, or with ``fixed`` scales by the module's name.

    Raises QuantizationError, naming the layer, for one that cannot: libraries skip those.
    """

    def quantize(x: Tensor, known: Fixed | None) -> codes.Coded:
        scale = None if known is None else known.scale.float().view(1, 1)
        return encode(x.reshape(-1, x.shape[-1]), kind, per, scale)

    inputs = Inputs(quantize, fixed, modules)
    for name, module in modules.items():
        _require(name, module, kind)
        if kind == "int8" and module.codes.device.type == "cpu":  # type: ignore[union-attr]
            _require_sums()
        module.__class__ = RealLinear
        module.product = Product(inputs, kind, inputs.fixed.get(name))  # type: ignore[assignment]
    setattr(model, ATTRIBUTE, inputs)


def encode(x: Tensor, kind: str, per: str, fixed: Tensor | None = None) -> codes.Coded:
    """As ``codes.encode``, by a kernel where there is one."""
    if x.is_cuda:
        from qbench.quantizers.products import kernels

        if kernels.fits(x):
            return kernels.encode(x.contiguous(), kind, per, fixed)
    return codes.encode(x, kind, per, fixed)


def multiply(kind: str, coded: codes.Coded, layer: ScaledLinear, dtype: torch.dtype) -> Tensor:
    """Codes [rows, in] by the layer's, times both scales, plus its bias: ``dtype`` [rows, out]."""
    return (_int8 if kind == "int8" else _fp8)(*coded, layer, dtype)


@cache
def _require_sums() -> None:
    """Raise QuantizationError where a CPU's int8 products saturate on the way: without VNNI two
    products are added in 16 bits, and no library says so."""
    ones = torch.full((16, 64), 127, dtype=torch.int8)
    found = _torchao("torchao.kernel").int_scaled_matmul(ones, ones.T, torch.ones(16, 1))
    if not bool((found == 64 * 127**2).all()):
        raise QuantizationError(
            f"int8 products are wrong on this CPU: 64 · 127² = {64 * 127**2:,} came out as "
            f"{int(found[0, 0]):,}; set arithmetic: simulated"
        )


def _require(name: str, module: nn.Module, kind: str) -> None:
    if not isinstance(module, ScaledLinear) or module.codes.dtype != codes.DTYPE[kind]:
        raise QuantizationError(
            f"{name}: {type(module).__name__} holds no {kind} codes that real products could take; "
            "set arithmetic: simulated"
        )
    size = MULTIPLE[kind]
    if module.in_features % size or module.out_features % size:
        raise QuantizationError(
            f"{name} is {module.in_features} → {module.out_features} wide: real {kind} products "
            f"take multiples of {size}, and libraries skip such a layer in silence; set "
            "arithmetic: simulated, or leave it out of weights and activations"
        )


def _int8(coded: Tensor, scale: Tensor, layer: ScaledLinear, dtype: torch.dtype) -> Tensor:
    rows = scale.expand(len(coded), 1)
    columns = layer.scale.expand(layer.out_features, 1)
    if coded.is_cuda:
        from qbench.quantizers.products import kernels

        return kernels.int8_product(
            coded, rows.contiguous(), layer.codes, columns.contiguous(), layer.bias, dtype
        )
    y = _torchao("torchao.kernel").int_scaled_matmul(coded, layer.codes.T, rows.contiguous())
    y = y * columns.T
    return (y if layer.bias is None else y + layer.bias.float()).to(dtype)


def _fp8(coded: Tensor, scale: Tensor, layer: ScaledLinear, dtype: torch.dtype) -> Tensor:
    """Sums in float32: fast accumulation, torchao's default, keeps about 14 bits of them."""
    rows, columns = scale, layer.scale
    if rows.numel() > 1 or columns.numel() > 1:  # a library takes one kind of scales at a time
        rows = rows.expand(len(coded), 1).contiguous()
        columns = columns.expand(layer.out_features, 1).contiguous()
    return _torchao("torchao.float8.inference").addmm_float8_unwrapped_inference(
        coded,
        rows,
        layer.codes.T,
        columns.T,
        output_dtype=dtype,
        bias=layer.bias,
        use_fast_accum=False,
    )


@cache
def _torchao(module: str) -> Any:
    """A module of torchao, its remarks kept from the terminal; what the user set stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        return importlib.import_module(module)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
