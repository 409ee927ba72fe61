"""Quantize layers by bitsandbytes, and build its modules from stored tensors.

On processors with AVX512-BF16 the library does two things wrong for 4 bits. It repacks weights at
the first forward, and unpacking them gives garbage: here no layer repacks. And its dequantization
assumes that every row begins a block of ``BLOCK`` weights: ``Linear4`` decodes other rows itself.

On a GPU it multiplies few rows of inputs by other kernels than many, which round the weights at
another place. How many rows an expert gets depends on the rest of the batch and on later tokens:
``Linear4`` dequantizes the weights of experts, as the library does for many rows.

For 8 bits it quantizes the input of each layer, and waits for a GPU twice to find the columns with
outliers. Queries, keys and values share an input, gate and up another: ``Linear8`` does this once
per input."""

from __future__ import annotations

import logging
from unittest.mock import patch

import torch
from torch import Tensor, nn

from qbench.quantizers.config import PackedWeight
from qbench.quantizers.linear import ROUTED, Tensors, bias_of, kept_weight
from qbench.quantizers.methods.weight_only import BNB_BLOCK as BLOCK
from qbench.quantizers.methods.weight_only import Bnb4, Bnb8

# Its decorators would import torch's compiler, a second and more, for functions that are not called
with patch.object(torch, "compile", lambda function=None, **_: function or (lambda f: f)):
    import bitsandbytes
    from bitsandbytes import functional

CODES = "qbench_codes"  # attribute of a tensor: its version, a threshold, and its codes

# LLM.int8 computes in float16 whatever the model's dtype, and says so at every call.
logging.getLogger("bitsandbytes.autograd._functions").addFilter(
    lambda record: "inputs will be cast" not in record.getMessage()
)


class Linear4(bitsandbytes.nn.Linear4bit):
    """bitsandbytes' 4-bit layer, correct for every width on a CPU too. ``routed``: an expert's."""

    routed = False

    @property
    def uneven(self) -> bool:
        """Return whether rows are not whole blocks of ``BLOCK`` weights."""
        return self.in_features % BLOCK != 0

    def by_library(self, device_type: str) -> bool:
        """Return whether bitsandbytes itself multiplies on a device of this type. On a CPU it would
        dequantize as below, and warn that it is slower."""
        return device_type != "cpu" and not (self.uneven or self.routed)

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + bias [..., out], by the library if ``by_library``, else dequantized."""
        if self.by_library(x.device.type):
            return super().forward(x)
        data, state = self.weight.data, self.weight.quant_state

        def dequantize() -> Tensor:
            broken = self.uneven and x.device.type == "cpu"
            weight = decode(self) if broken else functional.dequantize_4bit(data, state)
            return weight.to(self.compute_dtype)

        weight = kept_weight(self, (self.weight, state.absmax), dequantize)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return nn.functional.linear(x.to(self.compute_dtype), weight, bias).to(x.dtype)


class Linear8(bitsandbytes.nn.Linear8bitLt):
    """bitsandbytes' 8-bit layer, equal to the bit, also for inputs of more than three dimensions.
    Without gradients it reuses the codes that the previous layer made of the same input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the product [..., out] of ``x`` [..., in], as the library computes it."""
        rows, state = x.reshape(-1, x.shape[-1]), self.state
        learns = torch.is_grad_enabled() or self.training or torch.compiler.is_compiling()
        if learns or not x.numel():
            y = super().forward(rows)
        else:
            if self.weight.CB is not None:
                self.init_8bit_state()
            if self.bias is not None and self.bias.dtype != x.dtype:
                self.bias.data = self.bias.data.to(x.dtype)
            codes, scales, outliers = _codes_of(x, rows, state.threshold)
            y, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm.default(
                rows, codes, state.CB, scales, state.SCB, outliers, self.bias
            )
            self.weight.data = state.CB
        return y.reshape(*x.shape[:-1], self.out_features)


def _codes_of(x: Tensor, rows: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes and scales of ``rows``, which are ``x`` as a matrix, and the columns with
    outliers (None for a threshold of 0). They are kept as an attribute of ``x`` for the next layer,
    and are valid as long as ``x`` is not written to."""
    cached = getattr(x, CODES, None)
    if cached and cached[:2] == (x._version, threshold):
        return cached[2]
    made = functional.int8_vectorwise_quant(rows.to(torch.float16), threshold=threshold)
    if not x.is_inference():  # which counts no versions
        # the version now: on a CPU the library writes to float16, and back
        setattr(x, CODES, (x._version, threshold, made))
    return made


def decode(module: bitsandbytes.nn.Linear4bit) -> Tensor:
    """Return the weight, float32 [out, in], from codes and scales: level[code] times the block's
    scale. A byte holds two codes, the first in its upper half."""
    state = module.weight.quant_state
    packed = module.weight.data.reshape(-1)
    codes = torch.stack([packed >> 4, packed & 15], dim=1).reshape(-1)
    scales = state.absmax
    if state.nested:  # the scales are codes of another table of 256, in blocks
        second = state.state2
        sizes = second.absmax.repeat_interleave(second.blocksize)[: scales.numel()]
        scales = second.code[scales.long()] * sizes + state.offset
    weights = state.shape.numel()
    values = state.code[codes[:weights].long()]
    return (values * scales.repeat_interleave(state.blocksize)[:weights]).reshape(state.shape)


def quantize(name: str, layer: nn.Linear, settings: Bnb4 | Bnb8) -> Tensors:
    """Return the tensors to store of ``layer``, as bitsandbytes makes them: int8 codes [out, in]
    and ``absmax`` [out], or its packed 4-bit layout. ``name`` is not used."""
    weight = layer.weight.detach().contiguous()
    if isinstance(settings, Bnb8):
        codes, absmax, _ = functional.int8_vectorwise_quant(weight.half())
        return {"codes": codes, "absmax": absmax}
    data, state = functional.quantize_4bit(
        weight,
        blocksize=BLOCK,
        compress_statistics=settings.double_quant,
        quant_type=settings.quant_type,
    )
    return {"weight": data, **state.as_dict(packed=True)}


def from_packed(layer: nn.Linear, tensors: Tensors, settings: Bnb4 | Bnb8) -> nn.Module:
    """Return the bitsandbytes layer that computes ``layer`` with the weight in ``tensors``."""
    size, bias = (layer.in_features, layer.out_features), bias_of(layer)
    if isinstance(settings, Bnb8):
        with torch.device("meta"):
            module = Linear8(
                *size, bias=False, has_fp16_weights=False, threshold=settings.threshold
            )
        codes, absmax = tensors["codes"], tensors["absmax"]
        module.weight = bitsandbytes.nn.Int8Params(
            codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=absmax
        )
    else:
        with torch.device("meta"):
            module = Linear4(
                *size,
                bias=False,
                compute_dtype=getattr(torch, settings.compute_dtype),
                compress_statistics=settings.double_quant,
                quant_type=settings.quant_type,
            )
        module.support_avx512bf16_for_cpu = False
        module.routed = getattr(layer, ROUTED, False)
        module.weight = bitsandbytes.nn.Params4bit.from_prequantized(
            tensors["weight"],
            {name: tensor for name, tensor in tensors.items() if name != "weight"},
            device=tensors["weight"].device,
            module=module,
        )
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    return module.eval()


def unpack(module: nn.Module, settings: Bnb4 | Bnb8) -> PackedWeight | None:
    """Return the stored tensors of a bitsandbytes layer; None for a module of another kind."""
    if isinstance(module, bitsandbytes.nn.Linear8bitLt):
        held = module.weight if module.weight.SCB is not None else module.state  # after a forward
        codes, absmax = held.CB, held.SCB
        return PackedWeight(
            tensors={"codes": codes, "absmax": absmax},
            dequantize=lambda: codes.float() * (absmax.float() / 127)[:, None],
            groups=lambda weight: weight,
        )
    if not isinstance(module, bitsandbytes.nn.Linear4bit):
        return None
    state = module.weight.quant_state
    tensors = {"weight": module.weight.data, "absmax": state.absmax}
    if state.nested:
        tensors |= {"absmax2": state.state2.absmax, "offset": state.offset.reshape(1)}

    def blocks(weight: Tensor) -> Tensor:
        flat = weight.reshape(-1)  # filled up with a value of the matrix, so that no level is added
        return torch.cat([flat, flat[-1:].expand(-flat.numel() % BLOCK)]).view(-1, BLOCK)

    return PackedWeight(tensors=tensors, dequantize=lambda: decode(module), groups=blocks)
