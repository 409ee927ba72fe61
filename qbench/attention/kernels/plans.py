"""Calls like one that was made before, found at once: nothing about them is checked again.

For short sequences the host takes longer than the GPU does. What a call needs checked, converted
and chosen is the same for tensors that are laid out alike, so a plan is kept of each.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from qbench.attention.kernels.layouts import INTERPRETED
from qbench.attention.kernels.recall import Call, layout
from qbench.attention.kernels.settings import Settings
from qbench.attention.normalizers import NORMALIZERS, Normalizer

PLAIN = (Tensor, torch.nn.Parameter)
MOST = 1024  # plans that are kept
DECODED = 16  # at most so many queries are a step of decoding


class Plan:
    """``forward`` and ``backward``, by the layout of the gradient: the calls that
    :mod:`qbench.attention.kernels.recall` keeps, once they have been made."""

    def __init__(self, chosen: Normalizer, settings: Settings) -> None:
        self.chosen = chosen
        self.settings = settings
        self.forward: Call | None = None
        self.backward: dict[Hashable, Call] = {}


_plans: dict[Hashable, Plan] = {}


def unseen() -> bool:
    """Whether nothing looks into what runs, such as torch.compile or a mode of dispatch."""
    return not torch.compiler.is_compiling() and _get_current_dispatch_mode() is None


def described(
    query: Tensor, key: Tensor, value: Tensor, parameters: Mapping[str, Tensor] | None,
    about: tuple[Hashable, ...],
) -> Hashable:  # fmt: skip
    """All that a call depends on, ``about`` beside the tensors; None where each call must be looked
    at: under autocast, off the GPU, in decoding, and where something looks into it."""
    if not unseen() or torch.is_autocast_enabled(query.device.type):
        return None
    # Keys grow with every token that is decoded: no such call is like another.
    if query.shape[2] <= DECODED or not (query.is_cuda or INTERPRETED):
        return None
    found = [torch.is_grad_enabled(), about]
    for tensor in (query, key, value):
        if type(tensor) not in PLAIN:
            return None
        found += (tensor.requires_grad, layout(tensor))
    for name, tensor in (parameters or {}).items():
        kept = type(tensor) in PLAIN and tensor.dtype == torch.float32 and tensor.is_contiguous()
        if not kept:
            return None
        found += (name, tensor.requires_grad, layout(tensor))
    return tuple(found)


def known(described: Hashable, normalizer: str) -> Plan | None:
    plan = _plans.get(described)
    return plan if plan is not None and plan.chosen is NORMALIZERS.get(normalizer) else None


def remember(described: Hashable, normalizer: str, settings: Settings) -> None:
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[described] = Plan(NORMALIZERS.get(normalizer), settings)


def forget() -> None:
    _plans.clear()
