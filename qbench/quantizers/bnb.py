"""bitsandbytes: 4-bit blocks (nf4, fp4) and LLM.int8.

On processors with AVX512-BF16 bitsandbytes repacks 4-bit weights at the first forward, and what
undoes it is wrong: a later dequantization or save is garbage, and widths that are no multiple of
32 crash. Each layer asks at construction whether to do so; here it never does.
"""

from __future__ import annotations

import logging

import bitsandbytes
import torch
from bitsandbytes import functional
from torch import Tensor, nn

from qbench.quantizers.linears import Plain, Progress, Stored, Tensors, linears
from qbench.quantizers.settings import Bnb4, Bnb8

# LLM.int8 computes in float16 whatever the model's dtype, and says so at every call.
logging.getLogger("bitsandbytes.autograd._functions").addFilter(
    lambda record: "inputs will be cast" not in record.getMessage()
)

BLOCK = 64  # the library's, for 4 bits: consecutive weights of the flattened matrix


def quantize(
    model: nn.Module, settings: Bnb4 | Bnb8, calibration: None, progress: Progress
) -> tuple[dict[str, Tensors], str]:
    """What is to be stored for each linear layer, and what did it; computed where the model is."""
    layers, result = linears(model), {}
    for done, (name, layer) in enumerate(layers.items()):
        progress(name, done / len(layers))
        weight = layer.weight.detach().contiguous()
        result[name] = (_blocks if isinstance(settings, Bnb4) else _rows)(weight, settings)
    return result, "bitsandbytes"


def rebuild(shape: Plain, tensors: Tensors, settings: Bnb4 | Bnb8) -> nn.Module:
    module = (_linear4 if isinstance(settings, Bnb4) else _linear8)(shape, tensors, settings)
    if shape.bias is not None:
        module.bias = nn.Parameter(shape.bias, requires_grad=False)
    return module.eval()


def read(module: nn.Module, settings: Bnb4 | Bnb8) -> Stored | None:
    if isinstance(module, bitsandbytes.nn.Linear4bit):
        state = module.weight.quant_state
        nested = (state.state2.absmax, state.offset.reshape(1)) if state.nested else ()
        return Stored(
            weight=functional.dequantize_4bit(module.weight.data, state),
            tensors=(module.weight.data, state.absmax, *nested),
            groups=_blocks_of,
        )
    if isinstance(module, bitsandbytes.nn.Linear8bitLt):
        codes, absmax = _int8(module)
        return Stored(
            weight=codes.float() * (absmax.float() / 127)[:, None],
            tensors=(codes, absmax),
            groups=lambda weight: weight,
        )
    return None


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
        module = bitsandbytes.nn.Linear4bit(
            shape.in_features,
            shape.out_features,
            bias=False,
            compute_dtype=getattr(torch, settings.compute_dtype),
            compress_statistics=settings.double_quant,
            quant_type=settings.quant_type,
        )
    module.support_avx512bf16_for_cpu = False
    module.weight = bitsandbytes.nn.Params4bit.from_prequantized(
        tensors["weight"],
        {name: tensor for name, tensor in tensors.items() if name != "weight"},
        device=shape.device,
        module=module,
    )
    return module


def _rows(weight: Tensor, settings: Bnb8) -> Tensors:
    codes, absmax, _ = functional.int8_vectorwise_quant(weight.half())
    return {"codes": codes, "absmax": absmax}


def _linear8(shape: Plain, tensors: Tensors, settings: Bnb8) -> nn.Module:
    with torch.device("meta"):
        module = bitsandbytes.nn.Linear8bitLt(
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
    return module


def _int8(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Codes [out, in] and absolute maxima [out]; both move at the first forward."""
    held = module.weight if module.weight.SCB is not None else module.state
    return held.CB, held.SCB


def _blocks_of(weight: Tensor) -> Tensor:
    flat = weight.reshape(-1)
    padding = -flat.numel() % BLOCK
    if padding:  # with values that are there already, so that no level is added
        flat = torch.cat([flat, flat[-1:].expand(padding)])
    return flat.view(-1, BLOCK)
