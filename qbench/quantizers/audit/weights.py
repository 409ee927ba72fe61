"""One quantized layer, measured on the weights that its own forward multiplies by."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qbench.quantizers.config import PackedWeight, WeightSettings
from qbench.quantizers.matrices import Matrix
from qbench.records import ModuleAudit

ROWS = 512  # of the identity at once
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
def measure(
    matrix: Matrix, module: nn.Module, stored: PackedWeight, settings: WeightSettings
) -> Measured:
    """``module``, and what it says that it stores, against the unquantized ``matrix``."""
    rows, columns = matrix.weight.shape
    weight = forward_weight(module, columns, matrix.weight.dtype)
    wanted = matrix.weight.float()
    difference = weight.float() - wanted
    error_squared, norm_squared = (float(t.square().sum()) for t in (difference, wanted))
    finite = math.isfinite(error_squared)
    error = math.sqrt(error_squared / norm_squared) if finite and norm_squared else 0.0
    dead = (weight == 0).all(dim=0) & (wanted != 0).any(dim=0)
    bits = 8 * sum(t.numel() * t.element_size() for t in stored.tensors.values())
    result = ModuleAudit(
        name=matrix.name,
        kind=type(module).__name__,
        parameters=wanted.numel(),
        bits_per_weight=bits / wanted.numel(),
        weight_error=error if finite else math.inf,
        gain=float((weight.float() * wanted).sum()) / norm_squared
        if finite and norm_squared
        else None,
        levels=levels(stored.groups(weight)),
        dead_inputs=int(dead.sum()),
        digest=digest(stored.tensors),
    )
    problems = _wrong_storage(result, rows, columns, settings)
    if not finite:
        problems.append(f"{matrix.name}: weights that are not finite")
    else:
        problems += _wrong_weight(result, wanted, difference, dead, settings)
        problems += _disagreement(matrix, module, weight, stored, settings)
    return Measured(
        module=result,
        error_squared=error_squared if finite else math.inf,
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


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of the names."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        total.update(plain.numpy().tobytes())
    return total.hexdigest()


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


def _wrong_storage(
    result: ModuleAudit, rows: int, columns: int, settings: WeightSettings
) -> list[str]:
    problems, bits = [], settings.num_bits
    if result.levels > 2**bits:
        problems.append(
            f"{result.name}: {result.levels} levels in a group, {bits:g} bits have {2**bits:g}"
        )
    least, most = settings.bits_bounds(rows, columns)
    if not least <= result.bits_per_weight <= most:
        problems.append(
            f"{result.name}: stores {result.bits_per_weight:.2f} bits a weight, "
            f"{settings.name} should take {bits:g} to {most:.2f}"
        )
    return problems


def _wrong_weight(
    result: ModuleAudit, wanted: Tensor, difference: Tensor, dead: Tensor, settings: WeightSettings
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
    worst = settings.error_bound()
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
    matrix: Matrix,
    module: nn.Module,
    weight: Tensor,
    stored: PackedWeight,
    settings: WeightSettings,
) -> list[str]:
    """The forward's weight against the stored one, and against another forward."""
    on_identity, on_random = settings.agreement(str(matrix.weight.dtype).removeprefix("torch."))
    problems = []
    off = _relative(weight, stored.dequantize().to(weight.device))
    if not off <= on_identity:
        problems.append(f"{matrix.name}: the forward's weights are {off:.2g} off the stored ones")
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(16, weight.shape[1], generator=draw).to(weight.device, matrix.weight.dtype)
    expected = x.float() @ weight.float().T
    if module.bias is not None:
        expected = expected + module.bias.float()
    off = _relative(module(x), expected)
    if not off <= on_random:
        problems.append(
            f"{matrix.name}: on random inputs the forward is {off:.2g} off its own weights"
        )
    return problems


def _relative(found: Tensor, expected: Tensor) -> float:
    expected = expected.float()
    norm = float(expected.norm())
    off = float((found.float() - expected).norm())
    return off / norm if norm else off
