"""The weight matrices of a model: what a quantizer of weights must cover.

A weight matrix is a parameter of floating point with at least two dimensions longer than one, bias
left out, whose product with activations the model computes: linear layers, Conv1D layers of GPT-2,
experts (one by one where a model keeps them as one parameter), routers, convolutions. Those of
embeddings, of normalizing layers and of the LM head are none. Parameters of that shape that are no
factors of a product (a state space's A) count as well, for a name cannot tell them: they are small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from qbench.errors import QuantizationError
from qbench.quantizers.config import matching
from qbench.quantizers.experts import is_fused, parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """``weight`` as a linear layer would hold it, [out, in], or [experts, …] and the like.

    ``linear``: a linear layer multiplies by it, once ``linearize`` has taken the model apart.
    """

    name: str  # the parameter's, without ".weight"
    weight: Tensor
    linear: bool
    holder: str = "Linear"  # class of the module that holds it


def matrices(model: nn.Module) -> dict[str, Matrix]:
    """Every weight matrix of ``model``, by name, in the model's order; shared ones once."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    result: dict[str, Matrix] = {}
    seen: set[int] = set() if head is None else {id(p) for p in head.parameters()}
    for path, module in model.named_modules():
        if is_fused(module):
            for name, weight, _ in parts(module):
                result[f"{path}.{name}"] = Matrix(name=f"{path}.{name}", weight=weight, linear=True)
            seen |= {id(weight) for weight in module._parameters.values()}
        embedding = isinstance(module, nn.Embedding) or "Norm" in type(module).__name__
        for part, weight in module.named_parameters(recurse=False):
            linear = part == "weight" and is_linear(module)
            if id(weight) in seen or embedding or not (linear or _is_matrix(part, weight)):
                continue
            seen.add(id(weight))
            name = path if part == "weight" else f"{path}.{part}"
            turned = isinstance(module, Conv1D) and part == "weight"  # holds [in, out]
            result[name] = Matrix(
                name=name,
                weight=weight.T if turned else weight,
                linear=turned or linear,
                holder=type(module).__name__,
            )
    return result


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer: also one that a library put in its place, and of
    transformers' classes that derive from it those that compute no more (a router does)."""
    if not isinstance(module, nn.Linear):
        return False
    kind = type(module)
    own = kind.forward is not nn.Linear.forward and kind.__module__.startswith("transformers.")
    return not own or _multiplies(module)


@torch.no_grad()
def _multiplies(module: nn.Linear) -> bool:
    """Whether its forward, hooks aside, gives the product with its weight on some input."""
    x = module.weight.new_ones(1, module.in_features)
    try:
        found = type(module).forward(module, x)
    except Exception:  # whatever else it is, it is no linear layer
        return False
    expected = nn.functional.linear(x, module.weight, module.bias)
    return (
        isinstance(found, Tensor)
        and found.shape == expected.shape
        and bool(torch.allclose(found, expected, rtol=1e-2, atol=1e-2))
    )


def values(weight: Tensor) -> Tensor:
    """What ``weight`` stands for as a plain tensor: a library's subclass, as torchao's inside
    linear layers, dequantizes itself, and knows few other operations."""
    held = weight.data
    return held if type(held) is Tensor else held.dequantize()


def not_finite(model: nn.Module) -> list[str]:
    """Weights of ``model`` with NaN or infinite values, a line each."""
    return [
        f"{name}: {count:,} of {weight.numel():,} values are not finite"
        for name, weight in model.named_parameters()
        if weight.is_floating_point() and (count := int((~torch.isfinite(values(weight))).sum()))
    ]


def require_matches(model: nn.Module, patterns: tuple[str, ...], name: str) -> None:
    """Raise QuantizationError for a pattern that names no weight matrix of ``model``."""
    found = matrices(model)
    for pattern in patterns:
        if not matching(found, (pattern,)):
            parts = dict.fromkeys(
                part for n in found for part in n.split(".") if not part.isdigit()
            )
            raise QuantizationError(
                f"{name}: ignore: {pattern!r} names no weight matrix; their names are made "
                f"of {', '.join(parts)}"
            )


def _is_matrix(part: str, weight: Tensor) -> bool:
    long = sum(size > 1 for size in weight.shape)
    return weight.is_floating_point() and long >= 2 and "bias" not in part
