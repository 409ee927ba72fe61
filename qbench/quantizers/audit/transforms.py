"""Measure whether a transform kept the function of the unquantized model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qbench.quantizers.audit.independence import logits
from qbench.quantizers.config import QuantizationConfig
from qbench.quantizers.quantize import TRANSFORM, backend

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
    """Transform ``original`` in place as ``quantized`` was; return ‖logits − before‖ / ‖before‖ on
    token ids ``probe`` [B, T], and a line if that is more than rounding."""
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
