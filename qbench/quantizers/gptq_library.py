"""GPTQ through transformers' GPTQConfig, optimum and gptqmodel.

The library works on the model in place. What is kept of it are the packed tensors; modules are
made from those, with its PyTorch kernel: the only one with all of 2, 3, 4 and 8 bits, and the same
on CPU and CUDA. Its other kernels drift or crash on CPUs.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from qbench.errors import QuantizationError, UnavailableError
from qbench.quantizers.blocks import first_states, walk
from qbench.quantizers.calibration import Calibration
from qbench.quantizers.config import PackedWeight, Progress
from qbench.quantizers.gptq_words import unpacked
from qbench.quantizers.hessians import collecting
from qbench.quantizers.linear import Plain, Tensors, linears
from qbench.quantizers.optimum_patches import Ran, own_groups, own_packing, reporting, watched
from qbench.quantizers.replay import replaying

if TYPE_CHECKING:
    from qbench.quantizers.weights import Gptq

# Read by the library when it is imported or used; what the user set stays.
ENVIRONMENT = {
    "GPTQMODEL_DISABLE_GIL_WARNING": "1",
    "GPTQMODEL_CPU_WORKERS": "2",  # it stalls with one
    "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1",
}
PARTS = ("qweight", "qzeros", "scales", "g_idx")


def quantize(
    model: nn.Module, settings: Gptq, calibration: Calibration, progress: Progress
) -> tuple[dict[str, Tensors], str]:
    """What is to be stored for each linear layer, and what the library did beyond its orders.

    The model keeps its layers, not their weights. Raises QuantizationError for shapes that the
    library refuses, and where it would fall back to something that was not asked for.
    """
    layers = linears(model, settings.ignore)
    route = walk(model, layers, calibration, settings.batch_size)
    # Looked at and not kept: that the blocks' arguments are those of the route.
    deque(first_states(model, route, calibration, settings.batch_size), maxlen=0)
    optimum = _library("optimum.gptq.quantizer")
    transformers = importlib.import_module("transformers")
    ones = [1] * calibration.length
    config = transformers.GPTQConfig(
        bits=settings.num_bits,
        dataset=[
            {"input_ids": [row], "attention_mask": [ones]} for row in calibration.ids.tolist()
        ],
        group_size=settings.group_size,
        damp_percent=settings.damp,
        desc_act=settings.desc_act,
        act_group_aware=settings.group_aware,
        sym=settings.symmetric,
        true_sequential=settings.true_sequential,
        backend="gptq_torch",
        model_seqlen=calibration.length,
        block_name_to_quantize=route.root,
        batch_size=settings.batch_size,
        pad_token_id=0,  # asked for by batches, never used: samples are of one length
        modules_in_block_to_quantize=route.groups[0],
    )
    quantizer = optimum.GPTQQuantizer.from_dict(config.to_dict_optimum())
    quantizer.quantizeConfig.fallback = None  # else NaN turns into plain rounding, unasked
    ran = Ran()
    final: set[nn.Module] = set()
    attention = model.config._attn_implementation
    with (
        replaying(route, layers.values(), final) as replays,
        route.own_arguments(),
        collecting(replays, final) as hessians,
        watched(optimum, model, ran, hessians),
        own_packing(quantizer, layers, settings.num_bits) as packed,
        own_groups(optimum, quantizer, route),
        reporting(route, progress),
        silenced(),
    ):
        try:
            quantizer.quantize_model(model, None)
        except (ValueError, RuntimeError, NotImplementedError, IndexError) as error:
            raise QuantizationError(f"{settings.name}: gptqmodel: {_first_line(error)}") from error
    if quantizer.quantizeConfig.mock_quantization:
        raise QuantizationError(f"{settings.name}: gptqmodel fell back to plain rounding")
    if left := [name for name in layers if name not in packed]:
        raise QuantizationError(f"{settings.name}: gptqmodel left {left[0]} as it was")
    del model.config.quantization_config, model.is_quantized, model.quantization_method
    assert model.config._attn_implementation == attention
    raised = [damp for damp in ran.damps if damp > settings.damp + 1e-9]
    note = f"; damp raised to {max(raised):g} in {len(raised)} layers" if raised else ""
    return packed, f"gptqmodel, PyTorch kernel, columns in {ran.columns}{note}"


def rebuild(shape: Plain, tensors: Tensors, settings: Gptq) -> nn.Module:
    kernel = _library("gptqmodel.nn_modules.qlinear.torch")
    module = kernel.TorchLinear(
        bits=settings.num_bits,
        group_size=settings.group_size,
        sym=settings.symmetric,
        desc_act=settings.desc_act,
        in_features=shape.in_features,
        out_features=shape.out_features,
        bias=False,
        register_buffers=False,
    )
    for part in PARTS:
        module.register_buffer(part, tensors[part])
    module.bias = shape.bias
    module.qzero_format(2)  # as it lies in memory: zeros are the zeros, not one less
    module.optimized = True  # torch.compile of the dequantization: slow to start, no other result
    module.post_init()
    return module.eval()


def read(module: nn.Module, settings: Gptq) -> PackedWeight | None:
    if type(module).__name__ != "TorchLinear":
        return None
    order = torch.argsort(module.g_idx.long(), stable=True)
    size = settings.group_length(module.in_features)
    return PackedWeight(
        tensors={part: getattr(module, part) for part in PARTS},
        dequantize=lambda: decode(module),
        groups=lambda weight: weight[:, order.to(weight.device)].reshape(-1, size),
    )


def decode(module: nn.Module) -> torch.Tensor:
    """The weight, float32 [out, in], from codes, zeros and scales alone."""
    codes = unpacked(module.qweight, module.bits)[: module.in_features]
    zeros = unpacked(module.qzeros.T, module.bits)[: module.out_features].T
    group = module.g_idx.long()
    return ((codes - zeros[group]) * module.scales[group].float()).T


@contextmanager
def silenced() -> Iterator[None]:
    """Keep the library's banners, bars and warnings from the terminal; leave the root logger and
    the environment as they were.

    Its import sets the root logger's level, and moves Hugging Face's cache to /tmp for everything
    that is imported or started later. optimum reads every attribute of every module, deprecated
    ones too. Errors still raise.
    """
    root = logging.getLogger()
    level, handlers, environment = root.level, list(root.handlers), dict(os.environ)
    try:
        with (
            redirect_stdout(StringIO()),
            redirect_stderr(StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
        logging.getLogger("logbar").setLevel(logging.CRITICAL)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)


def _library(name: str) -> Any:
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        with silenced():
            return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(
            f"gptq: backend gptqmodel: {error}; install gptqmodel and optimum, or set "
            "backend: torch"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
