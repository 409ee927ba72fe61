"""Move activation outliers into weights by SmoothQuant (Xiao et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qbench.progress import Advance
from qbench.quantizers.calibration import Calibration, watch_inputs
from qbench.quantizers.linear import set_parameter
from qbench.quantizers.methods.equal_models import SmoothQuant

BATCH = 8  # calibration samples in one forward
TINIEST = 1e-5  # largest weight of a column, as the authors' code has it


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Group:
    """Linear ``layers`` with the same input of C channels, and the module ``before`` them, a norm
    or the linear layer that computes the input, whose output is divided by the scales. ``heads``:
    the shape of the channels, [heads of ``before``, uses of each, width], since query heads may
    share values."""

    before: nn.Module
    layers: tuple[nn.Linear, ...]
    heads: tuple[int, int, int] = (-1, 1, 1)

    def shared(self, channels: Tensor) -> Tensor:
        """Return, per channel of ``before``, the largest of the ``channels`` [C] that it feeds."""
        return channels.view(self.heads).amax(1).flatten()


def groups(model: PreTrainedModel, settings: SmoothQuant) -> dict[str, Group]:
    """Return the groups of layers to smooth, by name, block by block."""
    named, config = {}, model.config
    for index, block in enumerate(model.model.layers):
        attention, mlp = block.self_attn, block.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        every = {
            "attention": Group(before=block.input_layernorm, layers=projections),
            "mlp": Group(
                before=block.post_attention_layernorm, layers=(mlp.gate_proj, mlp.up_proj)
            ),
            "o_proj": Group(
                before=attention.v_proj,
                layers=(attention.o_proj,),
                heads=(config.num_key_value_heads, -1, attention.head_dim),
            ),
            "down_proj": Group(before=mlp.up_proj, layers=(mlp.down_proj,)),
        }
        named |= {f"model.layers.{index}.{kind}": every[kind] for kind in settings.layers}
    return named


@torch.no_grad()
def calibrate(
    model: PreTrainedModel,
    settings: SmoothQuant,
    calibration: Calibration | None,
    progress: Advance,
) -> dict[str, Tensor]:
    """Return s = max|X|^α / max|W|^(1 − α) per channel (Xiao et al. 2022, equation 4), float32
    [channels], by the group's name. Channels that calibration never reaches get 1: their scale
    would be near 0, and would blow up later inputs."""
    every = groups(model, settings)
    seen: dict[str, Tensor] = {}  # max|X| [C] by group

    def look(name: str, x: Tensor) -> None:
        largest = x.abs().flatten(0, -2).amax(0).float()
        seen[name] = torch.maximum(seen[name], largest) if name in seen else largest

    firsts = {name: group.layers[0] for name, group in every.items()}
    batches = calibration.ids.split(BATCH)
    watch_inputs(model.get_decoder(), firsts, look, batches, progress)
    result = {}
    for name, group in every.items():
        inputs = group.shared(seen[name])
        weights = torch.stack([layer.weight.abs().amax(0) for layer in group.layers]).amax(0)
        weights = group.shared(weights.double()).clamp(min=TINIEST)
        scale = inputs.double() ** settings.alpha / weights ** (1 - settings.alpha)
        usable = (inputs > 0) & torch.isfinite(scale) & (scale > 0)
        result[name] = torch.where(usable, scale, torch.ones_like(scale)).float()
    return result


@torch.no_grad()
def transform(model: PreTrainedModel, settings: SmoothQuant, tensors: Mapping[str, Tensor]) -> None:
    """Divide each group's input by its scales ``tensors``, those of ``calibrate``, in the module
    before it, and multiply the weights of its layers by them, in place."""
    for name, group in groups(model, settings).items():
        scale = tensors[name].double()
        # Divide the outputs of a norm or a linear layer by scale [C], in its weights
        module = group.before
        linear = isinstance(module, nn.Linear)
        set_parameter(module.weight, module.weight.double() / (scale[:, None] if linear else scale))
        if getattr(module, "bias", None) is not None:
            set_parameter(module.bias, module.bias.double() / scale)
        for layer in group.layers:
            heads = layer.weight.double().unflatten(1, group.heads)
            scaled = heads * scale.view(heads.shape[1], 1, -1)
            set_parameter(layer.weight, scaled.flatten(1))
