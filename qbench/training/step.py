"""One step: the passes over its sequences, the clipped gradient, the optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaForCausalLM

from qbench.training.averages import average_gradients, averaging_as_they_come
from qbench.training.compute import Compute
from qbench.training.feed import Share
from qbench.training.model import Loss
from qbench.training.optimizer import learning_rate, optimizers, set_learning_rate
from qbench.training.processes import Processes
from qbench.training.recipe import TrainingRecipe


class Step:
    """Takes its batches from ``feed``, which is set before the first step. Nothing in it asks the
    device for a number, so that the device never waits."""

    feed: Iterator[Tensor]

    def __init__(
        self, model: LlamaForCausalLM, recipe: TrainingRecipe, processes: Processes
    ) -> None:
        self.recipe, self.processes = recipe, processes
        self.parameters = dict(model.named_parameters())
        self.optimizers = optimizers(self.parameters, recipe.optimizer, fused=True)
        self.share = Share(
            rows=recipe.rows,
            sequences=recipe.batch.sequences,
            process=processes.index,
            processes=processes.count,
        )
        loss = _compiled(Loss(model, recipe.compute.precision), recipe.compute)
        self.loss: nn.Module = loss
        if processes.count > 1 and recipe.compute.graphs == "layers":
            self.loss = averaging_as_they_come(loss, processes, recipe.compute)

    def __call__(self, number: int) -> tuple[Tensor, Tensor]:
        """Step ``number``, from 0: the mean loss of this process's sequences in nats a token, and
        the gradient's norm before clipping. Both are scalars on the device."""
        recipe, passes = self.recipe, self.share.passes
        set_learning_rate(self.optimizers, learning_rate(number, recipe.steps, recipe.schedule))
        total = torch.zeros((), device=self.processes.device)
        for part in range(passes):
            with self._alone(last=part + 1 == passes):
                loss = self.loss(next(self.feed)) / passes
                loss.backward()
            total += loss.detach()
        if self.processes.count > 1 and not isinstance(self.loss, DistributedDataParallel):
            average_gradients(self.parameters.values(), self.processes, recipe.compute.travel)
        norm = clip_grad_norm_(self.parameters.values(), recipe.optimizer.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return total, norm

    @property
    def learning_rate(self) -> float:
        """Of AdamW, in the last step."""
        return self.optimizers[-1].param_groups[0]["lr"]

    def _alone(self, *, last: bool) -> AbstractContextManager[object]:
        """Gradients are averaged over the processes after the last pass alone."""
        during = isinstance(self.loss, DistributedDataParallel)
        return self.loss.no_sync() if during and not last else nullcontext()


def _compiled(loss: Loss, compute: Compute) -> Loss:
    loss.train()
    if not compute.compile:
        return loss
    # A recipe's models follow one another: the compiler would take each for the same one compiled
    # again, and give up at the eighth.
    torch._dynamo.reset()
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "mode": compute.compile}
    if compute.graphs == "layers":
        for part in (*loss.rest.decoder.layers, loss.rest.head):
            part.compile(**options)
    else:
        loss.rest.compile(**options)
    return loss
