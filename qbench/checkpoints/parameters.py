"""Tensors that a normalizer has beside the model's weights: where checkpoints keep them.

Under the attention module's name and the parameter's ``attribute``, in either format.
Imports no torch before a model is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from qbench.attention.implementation import NATIVE
from qbench.attention.normalizers import NORMALIZERS, Parameter
from qbench.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def parameter_shapes(
    normalizer: str, modules: Iterable[str], heads: int, present: Iterable[str]
) -> dict[str, list[int]]:
    """Names and shapes of the tensors that ``normalizer`` keeps in the attention ``modules`` of
    ``heads`` query heads; of those that it can do without, only where some are ``present``."""
    names, there = tuple(modules), set(present)
    shapes: dict[str, list[int]] = {}
    for parameter in _parameters(normalizer):
        shape = [heads if axis == "H" else int(axis) for axis in parameter.shape]
        wanted = {f"{name}.{parameter.attribute}": shape for name in names}
        if parameter.required or there & set(wanted):
            shapes |= wanted
    return shapes


def require_present(normalizer: str, names: Iterable[str]) -> None:
    """Raise CheckpointError where ``normalizer`` needs a parameter that none of the tensors'
    ``names`` ends as: for classes whose attention modules are not known before they are made."""
    there = {name.rpartition(".")[2] for name in names}
    for parameter in _parameters(normalizer):
        if parameter.required and parameter.attribute not in there:
            raise CheckpointError(
                f"missing: {parameter.attribute} of every attention module, which {normalizer} "
                "needs; qbench_normalizer in config.json says how the model was trained"
            )


def is_parameter(normalizer: str, name: str) -> bool:
    """Whether a tensor's name ends as those of a parameter of ``normalizer``."""
    attributes = [parameter.attribute for parameter in _parameters(normalizer)]
    return name.rpartition(".")[2] in attributes


def _parameters(normalizer: str) -> tuple[Parameter, ...]:
    """None where the model's class attends by itself, with tensors that it reads itself."""
    return () if normalizer == NATIVE else NORMALIZERS.get(normalizer).parameters


def attach(model: PreTrainedModel, normalizer: str, tensors: dict[str, torch.Tensor]) -> None:
    """Put ``tensors`` by name into the attention modules of ``model``, in its dtype.

    Raises CheckpointError for a module that is not there, for a shape that is not the parameter's,
    and for a module without what others of its class have.
    """
    from torch import nn

    if not tensors:  # models without attention heads are refused by name elsewhere
        return
    heads = model.config.num_attention_heads
    for name, tensor in tensors.items():
        path, _, attribute = name.rpartition(".")
        expected = parameter_shapes(normalizer, [path], heads, [name])[name]
        try:
            module = model.get_submodule(path)
        except AttributeError:
            raise CheckpointError(f"left over: {name}; the model has no {path}") from None
        if list(tensor.shape) != expected:
            raise CheckpointError(f"misshapen: {name} {list(tensor.shape)} instead of {expected}")
        value = nn.Parameter(tensor.to(model.dtype), requires_grad=False)
        module.register_parameter(attribute, value)
    for attribute in {name.rpartition(".")[2] for name in tensors}:
        of = {type(m) for m in model.modules() if attribute in m._parameters}
        without = [
            f"{path}.{attribute}"
            for path, m in model.named_modules()
            if type(m) in of and attribute not in m._parameters
        ]
        if without:
            raise CheckpointError(f"missing: {', '.join(without[:6])}")
