"""Gradients averaged over the processes of a training: after the passes, or while they last."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as distributed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from qbench.training.compute import Compute
from qbench.training.model import DTYPES
from qbench.training.processes import Processes


def average_gradients(parameters: Iterable[nn.Parameter], processes: Processes, dtype: str) -> None:
    """Replace each gradient by its mean over the processes, which add up in ``dtype``.

    They travel as one tensor, of whose parts the gradients are views afterwards. Parameters
    without a gradient, the same ones in every process, keep none.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    grads = [parameter.grad for parameter in trained]
    whole = torch.cat([grad.flatten() for grad in grads]).to(DTYPES[dtype])
    if processes.device.type == "cuda":
        distributed.all_reduce(whole, distributed.ReduceOp.AVG)
    else:  # gloo has no mean
        distributed.all_reduce(whole)
        whole /= processes.count
    parts = whole.to(grads[0].dtype).split([grad.numel() for grad in grads])
    for parameter, part in zip(trained, parts, strict=True):
        parameter.grad = part.view_as(parameter)


def averaging_as_they_come(
    loss: nn.Module, processes: Processes, compute: Compute
) -> DistributedDataParallel:
    """``loss``, whose gradients are averaged during its backward pass: for a model compiled layer
    by layer, which gives those of its last layers first."""
    place = processes.device
    parallel = DistributedDataParallel(
        loss,
        device_ids=[place.index] if place.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    if compute.travel == "bfloat16":
        parallel.register_comm_hook(None, bf16_compress_hook)
    return parallel
