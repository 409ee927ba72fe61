"""Proof that a model was quantized as its cell says, or what speaks against it.

Every number is taken from what scoring will run: a layer's weight is read off its own forward, by
giving it the identity. What the library says that it stored must agree with it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from qbench.quantizers.linears import linears
from qbench.quantizers.measure import Measured, measure
from qbench.quantizers.settings import Settings, Unquantized
from qbench.record import Audit


@torch.no_grad()
def audit(original: nn.Module, quantized: nn.Module, settings: Settings, probe: Tensor) -> Audit:
    """Compare ``quantized`` with the ``original`` it was made from, on one device.

    ``probe``: token ids [batch, time], a text on which the logits must have moved. Never raises
    for a bad quantization: ``passed`` is False then, and ``problems`` says why, a line each. All
    numbers of the result are finite.
    """
    moved, problems = _logits(original, quantized, probe)
    if isinstance(settings, Unquantized):
        return _audit_unquantized(original, quantized, settings, moved, problems)
    if moved == 0:
        problems.append("the logits are those of the unquantized model")
    before, after = linears(original), dict(quantized.named_modules())
    left_out = [n for n, layer in before.items() if type(after.get(n)) in (type(layer), type(None))]
    if left_out:
        problems.append(f"not quantized: {_some(left_out)}")
    measured: list[Measured] = []
    for name, layer in before.items():
        if name in left_out:
            continue
        try:
            measured.append(measure(name, layer, after[name], settings))
            problems += measured[-1].problems
        except Exception as error:  # whatever a broken layer raises is what is wrong with it
            problems.append(f"{name}: cannot be measured: {_line(error)}")
    weights = sum(layer.weight.numel() for layer in before.values())
    covered = sum(one.module.parameters for one in measured)
    stored = sum(one.module.bits_per_weight * one.module.parameters for one in measured)
    return Audit(
        passed=not problems,
        bits=settings.bits,
        coverage=covered / weights if weights else 0.0,
        bits_per_weight=stored / covered if covered else 0.0,
        weight_error=_ratio(
            sum(one.error_squared for one in measured), sum(one.norm_squared for one in measured)
        ),
        levels=max((one.module.levels for one in measured), default=0),
        logits_moved=moved,
        left_out=tuple(left_out),
        problems=tuple(problems),
        modules=tuple(one.module for one in measured),
    )


def _audit_unquantized(
    original: nn.Module,
    quantized: nn.Module,
    settings: Unquantized,
    moved: float,
    problems: list[str],
) -> Audit:
    """The weights are the original's, but for the cast to ``settings.dtype``."""
    dtype = getattr(torch, settings.dtype)
    after = dict(quantized.named_parameters())
    error_squared = norm_squared = 0.0
    for name, layer in linears(original).items():
        found = after.get(f"{name}.weight")
        if found is None or found.dtype != dtype or found.shape != layer.weight.shape:
            problems.append(f"{name}: not a plain linear layer in {settings.dtype}")
            continue
        wanted = layer.weight.float()
        difference = found.float() - wanted
        if not torch.equal(found, layer.weight.to(dtype)):
            problems.append(f"{name}: not the original weights")
        if torch.isfinite(difference).all():
            error_squared += float(difference.square().sum())
        norm_squared += float(wanted.square().sum())
    return Audit(
        passed=not problems,
        bits=None,
        coverage=0.0,
        bits_per_weight=8.0 * dtype.itemsize,
        weight_error=_ratio(error_squared, norm_squared),
        levels=0,
        logits_moved=moved,
        problems=tuple(problems),
    )


def _logits(original: nn.Module, quantized: nn.Module, probe: Tensor) -> tuple[float, list[str]]:
    """Largest movement of a logit among those that are finite, and what is wrong with them."""
    ids = probe.to(next(original.parameters()).device)
    before = original(input_ids=ids, use_cache=False).logits.float()
    try:
        after = quantized(input_ids=ids, use_cache=False).logits.float()
    except Exception as error:
        return 0.0, [f"the quantized model's forward fails: {_line(error)}"]
    problems = []
    if not torch.isfinite(before).all():
        problems.append("the unquantized model's logits are not finite")
    if not torch.isfinite(after).all():
        problems.append("logits are not finite")
    moved = (after - before).abs()
    return float(moved.where(torch.isfinite(moved), 0).max()), problems


def _ratio(error_squared: float, norm_squared: float) -> float:
    return math.sqrt(error_squared / norm_squared) if norm_squared else 0.0


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
