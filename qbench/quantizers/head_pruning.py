"""Attention heads that are cut out: those that give about nothing on the calibration text.

A pruned head's output is zero wherever the model attends.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qbench.errors import QuantizationError
from qbench.progress import Advance
from qbench.quantizers.calibration import Calibration, watch_inputs
from qbench.quantizers.kv_fake_quant import attention_modules
from qbench.quantizers.transforms import Dormant, Weakest

KEPT = "qbench_kept_heads"  # attribute of attention modules: 1 for heads that stay, 0 for others
PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "wo")  # what attention's output goes to


def calibrate(
    model: PreTrainedModel,
    settings: Dormant | Weakest,
    calibration: Calibration | None,
    progress: Advance,
) -> dict[str, Tensor]:
    """By attention module: which heads stay, uint8 [heads]."""
    found = output_ratios(model, calibration.ids, progress)
    kept = choose(settings, torch.stack(list(found.values())))
    return {name: own.to(torch.uint8).cpu() for name, own in zip(found, kept, strict=True)}


def choose(settings: Dormant | Weakest, ratios: Tensor) -> Tensor:
    """Which heads stay, bool [layers, heads], from their mean output norm on the text divided by
    the mean of their layer's heads."""
    if isinstance(settings, Dormant):
        return ratios >= settings.threshold
    kept = torch.ones(ratios.numel(), dtype=torch.bool, device=ratios.device)
    kept[ratios.flatten().argsort(stable=True)[: round(settings.share * ratios.numel())]] = False
    return kept.view(ratios.shape)


def install(
    model: PreTrainedModel, settings: Dormant | Weakest, tensors: Mapping[str, Tensor]
) -> None:
    for name, kept in tensors.items():
        setattr(model.get_submodule(name), KEPT, kept.to(device=model.device, dtype=model.dtype))


def output_projections(model: nn.Module) -> dict[str, nn.Module]:
    """Of the attention modules of ``model``, by their names."""
    return {
        name: getattr(module, next(p for p in PROJECTIONS if hasattr(module, p)))
        for name, module in attention_modules(model).items()
        if any(hasattr(module, p) for p in PROJECTIONS)
    }


def output_ratios(model: PreTrainedModel, ids: Tensor, progress: Advance) -> dict[str, Tensor]:
    """Of each attention module [heads], float64: mean norm of each head's output over the texts
    ``ids`` [N, T], divided by the mean over the module's heads. As
    ``qbench.analysis.attention.output_ratios`` has it of a text (Sandoval-Segura et al. 2025,
    arXiv 2504.03889). Raises QuantizationError for a model whose heads cannot be told."""
    projections = output_projections(model)
    if not projections:
        raise QuantizationError(
            f"prune_heads: the attention heads of {type(model).__name__} cannot be found; use a "
            f"model whose attention ends in one of {', '.join(PROJECTIONS)}"
        )
    heads = model.config.get_text_config().num_attention_heads
    sums: dict[str, Tensor] = {}

    def look(name: str, output: Tensor) -> None:
        output = output.unflatten(-1, (heads, -1)).float()
        norms = output.norm(dim=-1).double().flatten(0, -2).mean(0)
        sums[name] = sums[name] + norms if name in sums else norms

    watch_inputs(model, projections, look, ids.split(1), progress)
    found = {}
    for name, total in sums.items():
        mean = total.mean()
        found[name] = torch.where(mean > 0, total / mean, torch.zeros_like(total))
    return found


def evidence(model: nn.Module, settings: Dormant | Weakest) -> dict[str, Tensor]:
    """Which heads stay, by the name of the attention module; empty where none are pruned."""
    return {
        name: getattr(module, KEPT)
        for name, module in model.named_modules()
        if getattr(module, KEPT, None) is not None
    }
