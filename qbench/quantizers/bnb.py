"""The layers of bitsandbytes: what they store, and modules over it.

On processors with AVX512-BF16 the library does two things wrong, for 4 bits. It repacks weights at
the first forward, and what undoes it is garbage; each layer asks at construction whether to do so,
and here it never does. And its dequantization takes every row to begin a block of ``BLOCK``
weights, so it is right only where rows are whole blocks; ``Linear4`` decodes other rows itself.

On a GPU the library multiplies few rows of inputs by other kernels than many (up to 4, 7, 32, 320
or more, by shape and GPU), which round the weights elsewhere. How many rows an expert gets depends
on the rest of the batch and on later tokens, and so would its results: ``Linear4`` dequantizes the
weights of experts and multiplies by them, as the library does for many rows.
"""

from __future__ import annotations

import logging
import threading
import weakref

import bitsandbytes
import numpy as np
import torch
from bitsandbytes import functional
from torch import Tensor, nn

from qbench.quantizers.config import PackedWeight
from qbench.quantizers.linear import Plain, Tensors
from qbench.quantizers.weights import BNB_BLOCK as BLOCK
from qbench.quantizers.weights import Bnb4, Bnb8

# LLM.int8 computes in float16 whatever the model's dtype, and says so at every call.
logging.getLogger("bitsandbytes.autograd._functions").addFilter(
    lambda record: "inputs will be cast" not in record.getMessage()
)

_OPS = torch.ops.bitsandbytes


class Linear4(bitsandbytes.nn.Linear4bit):
    """The library's layer, right for every width on a CPU too. ``routed``: an expert's."""

    routed = False

    def forward(self, x: Tensor) -> Tensor:
        uneven = self.in_features % BLOCK != 0  # a GPU's does as below, and warns that it is slower
        if not (uneven or self.routed):
            return super().forward(x)
        data, state = self.weight.data, self.weight.quant_state
        broken = uneven and x.device.type == "cpu"
        weight = decode(self) if broken else functional.dequantize_4bit(data, state)
        weight = weight.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return nn.functional.linear(x.to(self.compute_dtype), weight, bias).to(x.dtype)


class Linear8(bitsandbytes.nn.Linear8bitLt):
    """The library's layer, for inputs of more than three dimensions too (DeepSeek's latents), that
    shares quantized inputs with its neighbours where no gradient is asked for."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if self._theirs(x):
            return super().forward(flat).reshape(*x.shape[:-1], self.out_features)
        if self.weight.CB is not None:
            self.init_8bit_state()
        codes, scales = self.state.CB, self.state.SCB
        if self.bias is not None and self.bias.dtype != x.dtype:
            self.bias.data = self.bias.data.to(x.dtype)
        inputs = quantized(x, self.state.threshold)
        outputs = _OPS.int8_scaled_mm.default(
            inputs.codes, codes, inputs.scales, scales, bias=self.bias, dtype=x.dtype
        )
        if (outliers := inputs.outliers(flat)) is not None:
            columns, values = outliers
            weight = _OPS.int8_vectorwise_dequant.default(codes[:, columns].contiguous(), scales)
            outputs = outputs.addmm(values, weight.to(x.dtype).t())
        self.weight.data = codes  # one copy, also after a move to another device
        return outputs.reshape(*x.shape[:-1], self.out_features)

    def _theirs(self, x: Tensor) -> bool:
        """Whether the library is to do it all: its gradients, and where nothing is computed."""
        asked = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (x, self.weight, self.bias) if tensor is not None
        )
        return asked or self.training or not x.numel() or torch.compiler.is_compiling()


def decode(module: bitsandbytes.nn.Linear4bit) -> Tensor:
    """The weight, float32 [out, in], from codes and scales alone: level[code] times the block's
    scale. A byte holds two codes, the first in its upper half."""
    state = module.weight.quant_state
    packed = module.weight.data.reshape(-1)
    codes = torch.stack([packed >> 4, packed & 15], dim=1).reshape(-1)
    scales = state.absmax
    if state.nested:  # the scales are codes of a table of 256 themselves, in blocks of their own
        second = state.state2
        sizes = second.absmax.repeat_interleave(second.blocksize)[: scales.numel()]
        scales = second.code[scales.long()] * sizes + state.offset
    weights = state.shape.numel()
    values = state.code[codes[:weights].long()]
    return (values * scales.repeat_interleave(state.blocksize)[:weights]).reshape(state.shape)


def quantize(name: str, layer: nn.Linear, settings: Bnb4 | Bnb8) -> Tensors:
    weight = layer.weight.detach().contiguous()
    return _blocks(weight, settings) if isinstance(settings, Bnb4) else _rows(weight)


def from_packed(shape: Plain, tensors: Tensors, settings: Bnb4 | Bnb8) -> nn.Module:
    if isinstance(settings, Bnb4):
        return _linear4(shape, tensors, settings)
    return _linear8(shape, tensors, settings)


def unpack(module: nn.Module, settings: Bnb4 | Bnb8) -> PackedWeight | None:
    return _read4(module) if isinstance(settings, Bnb4) else _read8(module)


def _blocks(weight: Tensor, settings: Bnb4) -> Tensors:
    data, state = functional.quantize_4bit(
        weight,
        blocksize=BLOCK,
        compress_statistics=settings.double_quant,
        quant_type=settings.quant_type,
    )
    return {"weight": data, **state.as_dict(packed=True)}


def _linear4(shape: Plain, tensors: Tensors, settings: Bnb4) -> nn.Module:
    with torch.device("meta"):
        module = Linear4(
            shape.in_features,
            shape.out_features,
            bias=False,
            compute_dtype=getattr(torch, settings.compute_dtype),
            compress_statistics=settings.double_quant,
            quant_type=settings.quant_type,
        )
    module.support_avx512bf16_for_cpu = False
    module.routed = shape.routed
    module.weight = bitsandbytes.nn.Params4bit.from_prequantized(
        tensors["weight"],
        {name: tensor for name, tensor in tensors.items() if name != "weight"},
        device=shape.device,
        module=module,
    )
    return _with_bias(module, shape)


def _read4(module: nn.Module) -> PackedWeight | None:
    if not isinstance(module, bitsandbytes.nn.Linear4bit):
        return None
    state = module.weight.quant_state
    tensors = {"weight": module.weight.data, "absmax": state.absmax}
    if state.nested:
        tensors |= {"absmax2": state.state2.absmax, "offset": state.offset.reshape(1)}
    return PackedWeight(tensors=tensors, dequantize=lambda: decode(module), groups=_blocks_of)


def _rows(weight: Tensor) -> Tensors:
    codes, absmax, _ = functional.int8_vectorwise_quant(weight.half())
    return {"codes": codes, "absmax": absmax}


def _linear8(shape: Plain, tensors: Tensors, settings: Bnb8) -> nn.Module:
    with torch.device("meta"):
        module = Linear8(
            shape.in_features,
            shape.out_features,
            bias=False,
            has_fp16_weights=False,
            threshold=settings.threshold,
        )
    module.weight = bitsandbytes.nn.Int8Params(
        tensors["codes"],
        requires_grad=False,
        has_fp16_weights=False,
        CB=tensors["codes"],
        SCB=tensors["absmax"],
    )
    return _with_bias(module, shape)


def _read8(module: nn.Module) -> PackedWeight | None:
    if not isinstance(module, bitsandbytes.nn.Linear8bitLt):
        return None
    held = module.weight if module.weight.SCB is not None else module.state  # moved by a forward
    codes, absmax = held.CB, held.SCB
    return PackedWeight(
        tensors={"codes": codes, "absmax": absmax},
        dequantize=lambda: codes.float() * (absmax.float() / 127)[:, None],
        groups=lambda weight: weight,
    )


def _with_bias(module: nn.Module, shape: Plain) -> nn.Module:
    if shape.bias is not None:
        module.bias = nn.Parameter(shape.bias, requires_grad=False)
    return module.eval()


def _blocks_of(weight: Tensor) -> Tensor:
    flat = weight.reshape(-1)
    padding = -flat.numel() % BLOCK
    if padding:  # with values that are there already, so that no level is added
        flat = torch.cat([flat, flat[-1:].expand(padding)])
    return flat.view(-1, BLOCK)


# Inputs of LLM.int8's layers, quantized once for all layers that are given the same: a block has
# seven linear layers and four inputs. The library quantizes seven times and each time waits for
# the GPU, once to learn whether there are outliers and once to learn where, while the GPU has
# nothing to do. Here which columns have outliers comes to the CPU beside the GPU's work, and is
# asked for when the first product of the codes, which does not need to know, is under way.


class Quantized:
    """Inputs as rows [M, K]: ``codes`` int8 [M, K] and ``scales`` float32 [M]; columns with
    outliers have codes of 0."""

    def __init__(self, codes: Tensor, scales: Tensor, columns: Tensor | None) -> None:
        """``columns``: the numbers of those with outliers, int64, or a bool for each [K]."""
        self.codes, self.scales = codes, scales
        self._columns, self._ready = columns, None
        if columns is not None and columns.dtype == torch.bool and columns.is_cuda:
            self._columns = columns.to("cpu", non_blocking=True)
            self._ready = torch.cuda.current_stream(columns.device).record_event()
        self._outliers: tuple[Tensor, Tensor] | None = None

    def outliers(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """The numbers [O] of columns with outliers, and these columns of ``rows`` [M, O], which
        were quantized; None where there are none. The first call may wait for a GPU."""
        columns, self._columns = self._columns, None
        if columns is not None:
            if self._ready is not None:
                self._ready.synchronize()
            if columns.dtype == torch.bool:
                columns = columns.nonzero().view(-1)
            if len(columns):
                columns = _moved(columns, rows.device)
                self._outliers = columns, rows[:, columns].contiguous()
        return self._outliers


class _Last(threading.local):
    """What this thread quantized last: the input's id, its version, the threshold, and the result
    in a list that is emptied as soon as the input is gone, when another may take its id."""

    known: tuple[tuple[int, int, float], list[Quantized], object] | None = None


_last = _Last()


def quantized(x: Tensor, threshold: float) -> Quantized:
    """``x`` [..., K] as the library quantizes it, or as it did at the last call of this thread
    where that was about the same tensor and nobody has written to it since. A tensor of
    ``torch.inference_mode`` does not tell that, and is always quantized."""
    if x.is_inference():
        return _quantize(x, threshold)
    if _last.known is not None:
        key, held, _ = _last.known
        if held and key == (id(x), x._version, threshold):
            return held[0]
    _last.known = None  # its memory, before more is taken
    found = _quantize(x, threshold)
    held = [found]
    key = (id(x), x._version, threshold)  # the library may write to it, and back
    _last.known = key, held, weakref.ref(x, lambda _: held.clear())
    return found


def _quantize(x: Tensor, threshold: float) -> Quantized:
    half = x.reshape(-1, x.shape[-1]).to(torch.float16)
    # The library's GPU kernel compares in float16 here and in float32 there.
    if not threshold or float(np.float16(threshold)) != threshold:
        return Quantized(*functional.int8_vectorwise_quant(half, threshold=threshold))
    outlying = half.abs() >= threshold
    columns = outlying.any(dim=0)
    codes, scales, _ = functional.int8_vectorwise_quant(half.masked_fill(outlying, 0))
    return Quantized(codes.masked_fill_(columns, 0), scales, columns)


def _moved(columns: Tensor, device: torch.device) -> Tensor:
    """Without waiting for what is queued on a GPU."""
    if columns.device == device:
        return columns
    return columns.pin_memory().to(device, non_blocking=True)
