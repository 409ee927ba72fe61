"""One quantized layer, measured on the weights that its own forward multiplies by."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qbench.quantizers.linears import Stored, along_rows, group_length
from qbench.quantizers.quantization import method_of
from qbench.quantizers.settings import WHOLE_ROW, Bnb4, Bnb8, Hqq, Settings
from qbench.record import ModuleAudit

ROWS = 512  # of the identity at once
AGREEMENT = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}  # relative, Frobenius
INT8_AGREEMENT = 5e-2  # LLM.int8 rounds activations to 127 steps as well
WORST_ERROR = {2: 1.0, 3: 0.7, 4: 0.4, 8: 0.05}  # relative; 1 is as bad as a weight of zeros
CALIBRATED = 2.0  # times that: GPTQ trades weight error for output error (1.2 seen at 2 bits)
MOST_DEAD = 0.5  # share of columns that GPTQ may zero; a softpick head can be silent on all text
LEAN = 0.5  # |mean| / root mean square of the errors; a zero point off by one gives near 1


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One quantized layer: its audit, the sums behind it, and what is wrong with it."""

    module: ModuleAudit
    error_squared: float
    norm_squared: float
    problems: tuple[str, ...]


@torch.no_grad()
def measure(name: str, layer: nn.Linear, module: nn.Module, settings: Settings) -> Measured:
    """``module`` against the unquantized ``layer`` that it stands for."""
    weight = forward_weight(module, layer.in_features, layer.weight.dtype)
    wanted = layer.weight.float()
    difference = weight.float() - wanted
    error_squared, norm_squared = (float(t.square().sum()) for t in (difference, wanted))
    finite = math.isfinite(error_squared)
    dead = (weight == 0).all(dim=0) & (wanted != 0).any(dim=0)
    stored = method_of(settings).read(module, settings) or _unknown(module, weight, settings)
    bits = 8 * sum(t.numel() * t.element_size() for t in stored.tensors)
    result = ModuleAudit(
        name=name,
        kind=type(module).__name__,
        parameters=wanted.numel(),
        bits_per_weight=bits / wanted.numel(),
        weight_error=math.sqrt(error_squared / norm_squared) if finite and norm_squared else 0.0,
        gain=float((weight.float() * wanted).sum()) / norm_squared
        if finite and norm_squared
        else None,
        levels=levels(stored.groups(weight)),
        dead_inputs=int(dead.sum()),
    )
    problems = _wrong_storage(result, layer, settings)
    if not finite:
        problems.append(f"{name}: weights that are not finite")
    else:
        problems += _wrong_weight(result, wanted, difference, dead, settings)
        problems += _disagreement(name, layer, module, weight, stored, settings)
    return Measured(
        module=result,
        error_squared=error_squared if finite else 0.0,
        norm_squared=norm_squared,
        problems=tuple(problems),
    )


def levels(groups: Tensor) -> int:
    """The most distinct values in a row of ``groups`` [number of groups, weights in a group]."""
    most = 0
    for part in groups.split(max(1, 2**24 // groups.shape[1])):
        ordered = part.sort(dim=1).values
        changes = (ordered[:, 1:] != ordered[:, :-1]).sum(dim=1)
        most = max(most, int(changes.max()) + 1 if changes.numel() else 1)
    return most


@torch.no_grad()
def forward_weight(module: nn.Module, in_features: int, dtype: torch.dtype) -> Tensor:
    """The weight that ``module``'s forward multiplies by: [out, in], in the dtype it answers in.

    A row of the identity picks one column, so no rounding but the weight's own takes part.
    """
    held = (value for value in vars(module).values() if isinstance(value, Tensor))
    device = next(t.device for t in (*module.parameters(), *module.buffers(), *held))
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
    """Bits a weight may take: its code, its share of a group's scale and zero and of an index of
    the columns, one in a hundred, and padding that small layers feel."""
    code, group = float(settings.bits), layer.in_features
    if isinstance(settings, Bnb8):
        shared = 32
    elif isinstance(settings, Bnb4):
        shared, group = 32, 64
    elif isinstance(settings, Hqq):
        shared, group = 16 * getattr(torch, settings.compute_dtype).itemsize, settings.group_size
        code = 3.2 if settings.bits == 3 else code  # ten codes in 32 bits
    else:
        shared, group = 16 + 8, group_length(settings, layer.in_features)
    return 1.01 * (code + shared / group + 32 / layer.out_features) + 512 / layer.weight.numel()


def _wrong_weight(
    result: ModuleAudit, wanted: Tensor, difference: Tensor, dead: Tensor, settings: Settings
) -> list[str]:
    if result.weight_error == 0 and wanted.any():
        return [f"{result.name}: the weights are the original's: nothing was quantized"]
    problems = []
    error = result.weight_error
    if settings.needs_calibration and dead.any():
        # Inputs that are zero on all calibration text get zeros, whatever their weights were.
        if dead.float().mean() > MOST_DEAD:
            problems.append(f"{result.name}: {int(dead.sum())} of {len(dead)} columns are zeros")
        wanted, difference = wanted[:, ~dead], difference[:, ~dead]
        error = float(difference.norm() / wanted.norm()) if wanted.any() else 0.0
    worst = WORST_ERROR[settings.bits] * (CALIBRATED if settings.needs_calibration else 1)
    if error > worst:
        problems.append(
            f"{result.name}: weight error {error:.2f}; {settings.name} should stay under {worst:g}"
        )
    spread = float(difference.square().mean().sqrt())
    lean = abs(float(difference.mean())) / spread if spread else 0.0
    if lean > LEAN:
        problems.append(
            f"{result.name}: the errors lean to one side by {lean:.2f} of their size, as where a "
            "zero point is off"
        )
    return problems


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
    """A module of no method's own: all its tensors count, groups lie along rows."""
    size = getattr(settings, "group_size", WHOLE_ROW)
    whole = size == WHOLE_ROW or weight.shape[1] % size
    tensors = [*module.parameters(), *module.buffers()]
    return Stored(
        weight=weight,
        tensors=tuple(t for t in tensors if t is not module.bias),
        groups=along_rows(weight.shape[1] if whole else size),
    )


def _relative(found: Tensor, expected: Tensor) -> float:
    expected = expected.float()
    norm = float(expected.norm())
    off = float((found.float() - expected).norm())
    return off / norm if norm else off
