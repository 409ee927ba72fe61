"""Optimizers of torch.optim for a recipe's settings, and the learning rate of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import AdamW, Muon

from qbench.training.recipe import Optimizer, Schedule


def learning_rate(step: int, steps: int, schedule: Schedule) -> float:
    """Of ``step`` (from 0) over the peak: linear up to 1, then cosine to the floor at ``steps``."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.decay == "none":
        return 1.0
    done = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
    return schedule.floor + (1 - schedule.floor) * 0.5 * (1 + math.cos(math.pi * done))


def optimizers(
    parameters: Mapping[str, nn.Parameter], settings: Optimizer, *, fused: bool
) -> list[torch.optim.Optimizer]:
    """AdamW over all ``parameters``; with Muon, that over the layers' matrices first.

    Each group keeps its peak learning rate as ``peak``.
    """
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    found: list[torch.optim.Optimizer] = []
    if settings.name == "muon":
        chosen = {n: p for n, p in trained.items() if p.ndim == 2 and ".layers." in n}
        rate = settings.muon_learning_rate
        assert rate is not None, "the recipe checks that"
        # Its updates are as large as AdamW's, so that weight decay and warm-up carry over
        # (Liu et al. 2025, arXiv 2502.16982, section 2.2).
        found.append(
            Muon(
                list(chosen.values()),
                lr=rate,
                weight_decay=settings.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
        trained = {name: p for name, p in trained.items() if name not in chosen}
    matrices = [p for p in trained.values() if p.ndim >= 2]
    vectors = [p for p in trained.values() if p.ndim < 2]
    decay = settings.weight_decay
    groups = [
        {"params": matrices, "weight_decay": decay},
        {"params": vectors, "weight_decay": decay if settings.decay_vectors else 0.0},
    ]
    found.append(
        AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            fused=fused,
        )
    )
    for optimizer in found:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return found


def set_learning_rate(found: list[torch.optim.Optimizer], share: float) -> None:
    for optimizer in found:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share
