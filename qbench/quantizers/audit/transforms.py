"""Proof that a transform changed no function, and that pruned heads give nothing and the others
something: measured in every cell that has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qbench.quantizers.audit.independence import logits
from qbench.quantizers.calibration import watch_inputs
from qbench.quantizers.config import QuantizationConfig
from qbench.quantizers.head_pruning import output_projections
from qbench.quantizers.quantize import TRANSFORM, backend, evidence_of
from qbench.records import HeadsAudit

# Of the logits' norm. Changed weights are rounded anew, and so is what passes between layers: as
# much as another order of sums gives: 0.008 was seen in bfloat16 through 12 layers.
MOST = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.05}


@torch.no_grad()
def measure_transform(
    original: nn.Module,
    quantized: nn.Module,
    config: QuantizationConfig,
    probe: Tensor,
    before: Tensor,
) -> tuple[float, list[str]]:
    """Transform ``original`` as ``quantized`` was, in place: how far its logits on ``probe`` moved
    from those ``before``, relative to their norm, and what is wrong with that."""
    tensors = getattr(quantized, TRANSFORM)
    backend(config.transform).transform(original, config.transform, tensors)
    off = float((logits(original, probe) - before).norm() / before.norm())
    most, problems = MOST[next(original.parameters()).dtype], []
    if not off <= most:
        problems.append(
            f"the transform moved the unquantized model's logits by {off:.2g} of their norm; it "
            f"should change nothing beyond rounding, which is less than {most:g}"
        )
    return off, problems


@torch.no_grad()
def measure_heads(
    quantized: nn.Module, config: QuantizationConfig, probe: Tensor
) -> tuple[HeadsAudit, list[str]]:
    """What reaches the output projections of ``quantized`` on ``probe`` [B, T], and what speaks
    against it."""
    wanted = evidence_of(quantized, config, "pruning")
    projections = output_projections(quantized)
    missing = [name for name in projections if name not in wanted]
    problems = [f"{name}: no head pruning is installed" for name in missing]
    given: dict[str, Tensor] = {}

    def look(name: str, output: Tensor) -> None:
        heads = output.unflatten(-1, (len(wanted[name]), -1)).float().abs()
        given[name] = heads.movedim(-2, 0).flatten(1).amax(1)

    pruning = {name: one for name, one in projections.items() if name in wanted}
    watch_inputs(quantized, pruning, look, [probe])
    pruned, largest = [], 0.0
    for layer, (name, kept) in enumerate(wanted.items()):
        for head in (kept == 0).nonzero()[:, 0].tolist():
            pruned.append((layer, head))
            largest = max(largest, float(given[name][head]))
    if largest > 0:
        problems.append(f"pruned heads give up to {largest:.3g} on the probe text")
    total = sum(len(kept) for kept in wanted.values())
    return HeadsAudit(total=total, pruned=tuple(pruned), largest_output=largest), problems
