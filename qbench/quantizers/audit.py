"""Proof that a model was quantized as its cell says, or what speaks against it.

Every number is taken from what scoring will run: a layer's weight is read off its own forward, by
giving it the identity. What the library says that it stored must agree with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qbench.quantizers.linears import Stored, along_rows, linears
from qbench.quantizers.quantization import method_of
from qbench.quantizers.settings import WHOLE_ROW, Bnb4, Bnb8, Hqq, Settings, Unquantized
from qbench.record import Audit, ModuleAudit

ROWS = 512  # of the identity at once
AGREEMENT = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}  # relative, Frobenius
INT8_AGREEMENT = 5e-2  # LLM.int8 rounds activations to 127 steps as well
WORST_ERROR = {2: 1.0, 3: 0.7, 4: 0.4, 8: 0.05}  # relative; 1 is as bad as a weight of zeros


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """One quantized layer: its audit, the sums behind it, and what is wrong with it."""

    module: ModuleAudit
    error_squared: float
    norm_squared: float
    problems: tuple[str, ...]


@torch.no_grad()
def audit(original: nn.Module, quantized: nn.Module, settings: Settings, probe: Tensor) -> Audit:
    """Compare ``quantized`` with the ``original`` it was made from, on one device.

    ``probe``: token ids [batch, time], a text on which the logits must have moved. Never raises
    for a bad quantization: ``passed`` is False then, and ``problems`` says why, a line each.
    """
    before = linears(original)
    moved, logits_problems = _logits(original, quantized, probe)
    if isinstance(settings, Unquantized):
        return _audit_unquantized(original, quantized, settings, moved, logits_problems)
    after = dict(quantized.named_modules())
    measured, left_out = [], []
    for name, layer in before.items():
        if type(after.get(name)) in (type(layer), type(None)):
            left_out.append(name)
        else:
            measured.append(_measure(name, layer, after[name], settings))
    weights = sum(layer.weight.numel() for layer in before.values())
    covered = sum(one.module.parameters for one in measured)
    problems = list(logits_problems)
    if moved == 0:
        problems.append("the logits are those of the unquantized model")
    if left_out:
        problems.append(f"not quantized: {_some(left_out)}")
    for one in measured:
        problems += one.problems
    stored = sum(one.module.bits_per_weight * one.module.parameters for one in measured)
    return Audit(
        passed=not problems,
        bits=settings.bits,
        coverage=covered / weights if weights else 0.0,
        bits_per_weight=stored / covered if covered else 0.0,
        weight_error=_ratio(measured),
        levels=max((one.module.levels for one in measured), default=0),
        logits_moved=moved,
        left_out=tuple(left_out),
        problems=tuple(problems),
        modules=tuple(one.module for one in measured),
    )


def levels(groups: Tensor) -> int:
    """The most distinct values in a row of ``groups`` [number of groups, weights in a group]."""
    most = 0
    for part in groups.split(max(1, 2**24 // groups.shape[1])):
        ordered = part.sort(dim=1).values
        changes = (ordered[:, 1:] != ordered[:, :-1]).sum(dim=1)
        most = max(most, int(changes.max()) + 1 if changes.numel() else 1)
    return most


def forward_weight(module: nn.Module, in_features: int, dtype: torch.dtype) -> Tensor:
    """The weight that ``module``'s forward multiplies by: [out, in], in the dtype it answers in.

    A row of the identity picks one column, so no rounding but the weight's own takes part.
    """
    device = next(t.device for t in (*module.parameters(), *module.buffers(), *_held(module)))
    bias, module.bias = module.bias, None  # added and taken off again, it would round
    try:
        rows = []
        for start in range(0, in_features, ROWS):
            count = min(ROWS, in_features - start)
            identity = torch.zeros(count, in_features, dtype=dtype, device=device)
            identity[:, start:].fill_diagonal_(1)
            rows.append(module(identity))
    finally:
        module.bias = bias
    return torch.cat(rows).T


def _measure(name: str, layer: nn.Linear, module: nn.Module, settings: Settings) -> _Measured:
    weight = forward_weight(module, layer.in_features, layer.weight.dtype)
    wanted = layer.weight.float()
    difference = float((weight.float() - wanted).square().sum())
    norm = float(wanted.square().sum())
    stored = method_of(settings).read(module) or _unknown(module, weight, settings)
    result = ModuleAudit(
        name=name,
        kind=type(module).__name__,
        parameters=wanted.numel(),
        bits_per_weight=8
        * sum(t.numel() * t.element_size() for t in stored.tensors)
        / wanted.numel(),
        weight_error=math.sqrt(difference / norm) if norm else 0.0,
        levels=levels(stored.groups(weight)),
    )
    problems = [
        *_wrong_storage(result, layer, settings),
        *_wrong_weight(result, norm, settings),
        *_disagreement(name, layer, module, weight, stored, settings),
    ]
    return _Measured(
        module=result, error_squared=difference, norm_squared=norm, problems=tuple(problems)
    )


def _wrong_storage(result: ModuleAudit, layer: nn.Linear, settings: Settings) -> list[str]:
    problems, bits = [], settings.bits
    if result.levels > 2**bits:
        problems.append(
            f"{result.name}: {result.levels} levels in a group, {bits} bits have {2**bits}"
        )
    most = _most_bits(layer, settings)
    if not bits * 0.99 <= result.bits_per_weight <= most:
        problems.append(
            f"{result.name}: stores {result.bits_per_weight:.2f} bits a weight, "
            f"{settings.name} should take {bits} to {most:.2f}"
        )
    return problems


def _most_bits(layer: nn.Linear, settings: Settings) -> float:
    """Bits a weight may take: codes (ten 3-bit codes lie in 32 bits), scale and zero of a group in
    at most 32 bits each, something a row and a column, and a rest that small layers feel."""
    if isinstance(settings, Bnb8):
        group = layer.in_features
    elif isinstance(settings, Bnb4):
        group = 64
    elif settings.group_size == WHOLE_ROW:
        group = layer.in_features
    else:
        group = settings.group_size
    codes = settings.bits * 1.07 + (0.02 if isinstance(settings, Hqq) else 0)
    edges = 32 / layer.in_features + 32 / layer.out_features
    return codes + 64 / group + edges + 512 / layer.weight.numel()


def _wrong_weight(result: ModuleAudit, norm: float, settings: Settings) -> list[str]:
    worst = WORST_ERROR[settings.bits]
    if not math.isfinite(result.weight_error):
        return [f"{result.name}: weights that are not finite"]
    if result.weight_error == 0 and norm > 0:
        return [f"{result.name}: the weights are the original's: nothing was quantized"]
    if result.weight_error > worst:
        return [
            f"{result.name}: weight error {result.weight_error:.2f}; at this width it should stay "
            f"under {worst:g}"
        ]
    return []


def _disagreement(
    name: str,
    layer: nn.Linear,
    module: nn.Module,
    weight: Tensor,
    stored: Stored,
    settings: Settings,
) -> list[str]:
    """The forward's weight against the stored one, and against another forward."""
    tolerance = INT8_AGREEMENT if isinstance(settings, Bnb8) else AGREEMENT[layer.weight.dtype]
    problems = []
    off = _relative(stored.weight.to(weight.device), weight)
    if not off <= tolerance:
        problems.append(f"{name}: the forward's weights are {off:.2g} off the stored ones")
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(16, layer.in_features, generator=draw).to(weight.device, layer.weight.dtype)
    expected = x.float() @ weight.float().T
    if module.bias is not None:
        expected = expected + module.bias.float()
    off = _relative(module(x), expected)
    if not off <= tolerance:
        problems.append(f"{name}: on random inputs the forward is {off:.2g} off its own weights")
    return problems


def _unknown(module: nn.Module, weight: Tensor, settings: Settings) -> Stored:
    """A module of no method's own: all tensors count, groups lie along rows."""
    size = getattr(settings, "group_size", WHOLE_ROW)
    whole = size == WHOLE_ROW or weight.shape[1] % size
    tensors = [*module.parameters(), *module.buffers()]
    return Stored(
        weight=weight,
        tensors=tuple(t for t in tensors if t is not module.bias),
        groups=along_rows(weight.shape[1] if whole else size),
    )


def _audit_unquantized(
    original: nn.Module,
    quantized: nn.Module,
    settings: Unquantized,
    moved: float,
    logits_problems: list[str],
) -> Audit:
    """The weights are the original's, but for the cast to ``settings.dtype``."""
    dtype = getattr(torch, settings.dtype)
    difference = norm = 0.0
    problems, after = list(logits_problems), dict(quantized.named_parameters())
    for name, layer in linears(original).items():
        found = after.get(f"{name}.weight")
        if found is None or found.dtype != dtype or found.shape != layer.weight.shape:
            problems.append(f"{name}: not a plain linear layer in {settings.dtype}")
            continue
        wanted = layer.weight.to(dtype).float()
        if not torch.equal(found.float(), wanted):
            problems.append(f"{name}: not the original weights")
        difference += float((found.float() - wanted).square().sum())
        norm += float(wanted.square().sum())
    return Audit(
        passed=not problems,
        bits=None,
        coverage=0.0,
        bits_per_weight=8.0 * dtype.itemsize,
        weight_error=math.sqrt(difference / norm) if norm else 0.0,
        levels=0,
        logits_moved=moved,
        problems=tuple(problems),
    )


def _logits(original: nn.Module, quantized: nn.Module, probe: Tensor) -> tuple[float, list[str]]:
    """Largest movement of a logit, and what is wrong with them."""
    ids = probe.to(next(original.parameters()).device)
    before = original(input_ids=ids, use_cache=False).logits.float()
    after = quantized(input_ids=ids, use_cache=False).logits.float()
    problems = []
    if not torch.isfinite(before).all():
        problems.append("the unquantized model's logits are not finite")
    if not torch.isfinite(after).all():
        problems.append("logits are not finite")
    moved = float((after - before).abs().max())
    return (moved if math.isfinite(moved) else math.inf), problems


def _relative(found: Tensor, expected: Tensor) -> float:
    expected = expected.float()
    norm = float(expected.norm())
    off = float((found.float() - expected).norm())
    return off / norm if norm else off


def _ratio(measured: list[_Measured]) -> float:
    norm = sum(one.norm_squared for one in measured)
    return math.sqrt(sum(one.error_squared for one in measured) / norm) if norm else 0.0


def _held(module: nn.Module) -> list[Tensor]:
    return [value for value in vars(module).values() if isinstance(value, Tensor)]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
