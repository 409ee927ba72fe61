"""Experts that a model keeps as one parameter, taken apart into a linear layer an expert.

transformers holds the experts of Mixtral, Qwen MoE, DeepSeek, gpt-oss and others as
``gate_up_proj`` [experts, 2 · inner, hidden] and ``down_proj`` [experts, hidden, inner] (gpt-oss
turned), which no quantizer of linear layers would see. ``split`` puts in their place a module that
computes the same with ``<expert>.gate_up_proj`` and ``<expert>.down_proj``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

DOWN = "down_proj"
ROUTED = "qbench_routed"  # attribute of an expert's layer


def is_fused(module: nn.Module) -> bool:
    """Whether ``module`` holds experts as transformers' experts interface has them, and does
    nothing that ``Experts`` does not."""
    first = first_part(module)
    return (
        first is not None
        and not getattr(module, "has_post_expert_norm", False)
        and not isinstance(module, Experts)
        and {first, DOWN} <= set(module._parameters)
        and all(module._parameters[part].dim() == 3 for part in (first, DOWN))
    )


def is_routed(layer: nn.Module) -> bool:
    """Whether it is a layer of an expert that :func:`split` took apart."""
    return getattr(layer, ROUTED, False)


def first_part(module: nn.Module) -> str | None:
    """The name of the parameter that experts multiply by first; None where it has no experts."""
    if not hasattr(module, "has_gate") or not hasattr(module, "is_transposed"):
        return None
    return "gate_up_proj" if module.has_gate else "up_proj"


def parts(module: nn.Module) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """``<expert>.<part>``, weight [out, in] and bias [out] of each matrix of fused experts; views
    of what the module holds."""
    first = first_part(module)
    assert first is not None
    for expert in range(module.down_proj.shape[0]):
        for part in (first, DOWN):
            weight = getattr(module, part)[expert]
            bias = getattr(module, f"{part}_bias")[expert] if module.has_bias else None
            yield f"{expert}.{part}", weight.T if module.is_transposed else weight, bias


class Experts(nn.Module):
    """Experts as linear layers: what ``fused`` computes, expert by expert."""

    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        # In a tuple, so that what is left of the fused module (its activation and constants) is no
        # part of the model's tree.
        self._fused = (fused,)
        self.first = first_part(fused)
        self.count = fused.down_proj.shape[0]
        for name, weight, bias in parts(fused):
            expert, part = name.split(".")
            if part != DOWN:
                self.add_module(expert, nn.Module())
            self.get_submodule(expert).add_module(part, _linear(weight, bias))
        for part in (self.first, DOWN):
            for name in (part, f"{part}_bias"):
                fused._parameters.pop(name, None)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[tokens, hidden] of the ``top_k_index`` [tokens, k] experts, weighted by
        ``top_k_weights`` [tokens, k]."""
        (fused,) = self._fused
        result = torch.zeros_like(hidden_states)
        for expert in range(self.count):
            tokens, place = torch.where(top_k_index == expert)
            module = self.get_submodule(str(expert))
            up, down = getattr(module, self.first), module.down_proj
            # Calibration follows every layer; quantized ones need not take nothing.
            if not len(tokens) and type(up) is not nn.Linear:
                continue
            inner = up(hidden_states[tokens])
            inner = fused._apply_gate(inner) if fused.has_gate else fused.act_fn(inner)
            weighted = down(inner) * top_k_weights[tokens, place, None]
            result.index_add_(0, tokens, weighted.to(result.dtype))
        return result

    def extra_repr(self) -> str:
        return f"{self.count} experts"


def split(model: nn.Module) -> None:
    """Take every fused experts module of ``model`` apart, in place."""
    for name, module in list(model.named_modules()):
        if is_fused(module):
            model.set_submodule(name, Experts(module))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
    setattr(layer, ROUTED, True)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return layer
