"""Proof that pruned heads give nothing, and the others something, on the audit's probe."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from qbench.quantizers.config import QuantizationConfig
from qbench.quantizers.heads import attention_modules
from qbench.quantizers.quantize import evidence_of
from qbench.records import HeadsAudit


@torch.no_grad()
def measure_heads(
    quantized: nn.Module, config: QuantizationConfig, probe: Tensor
) -> tuple[HeadsAudit | None, list[str]]:
    """What reaches the output projections of ``quantized`` on ``probe`` [B, T], and what speaks
    against it; None for cells that prune no heads."""
    wanted = evidence_of(quantized, config).heads
    if config.precision.heads is None:
        return None, []
    modules = attention_modules(quantized)
    problems = [f"{name}: no head pruning is installed" for name in modules if name not in wanted]
    given: dict[str, Tensor] = {}

    def look(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            heads = len(wanted[name])
            output = arguments[0].unflatten(-1, (heads, -1)).float().abs()
            given[name] = output.movedim(-2, 0).flatten(1).amax(1)

        return hook

    # Before the hooks that quantize what the projection takes in.
    hooks = [
        modules[name][1].register_forward_pre_hook(look(name), prepend=True)
        for name in wanted
        if name in modules
    ]
    try:
        quantized(input_ids=probe.to(next(quantized.parameters()).device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    pruned, largest = [], 0.0
    for layer, (name, kept) in enumerate(wanted.items()):
        if name not in given:
            problems.append(f"{name}: the probe never reached its output projection")
            continue
        for head in (kept == 0).nonzero()[:, 0].tolist():
            pruned.append((layer, head))
            largest = max(largest, float(given[name][head]))
    if largest > 0:
        problems.append(f"pruned heads give up to {largest:.3g} on the probe text")
    total = sum(len(kept) for kept in wanted.values())
    return HeadsAudit(total=total, pruned=tuple(pruned), largest_output=largest), problems
