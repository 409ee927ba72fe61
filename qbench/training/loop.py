"""One training, from the first step or from where it stopped, to its last."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor, nn
from torch._inductor import config
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaForCausalLM

from qbench.code import code_digest, digest_of
from qbench.errors import EvaluationError, TrainingError
from qbench.machine import environment
from qbench.records import TrainingSample, TrainingSession
from qbench.training.checkpoint import (
    LAST,
    Progress,
    load_state,
    read_progress,
    require_same,
    save_state,
)
from qbench.training.data import Sequences, dataloader
from qbench.training.log import Log
from qbench.training.model import (
    Loss,
    adamw,
    attention_kernels,
    flops_per_token,
    learning_rate,
    peak_tflops,
)
from qbench.training.recipe import Compute, TrainingRecipe

SETTLED = 3  # steps before one is profiled: the first ones compile
LIBRARIES = ("accelerate", "triton")  # beside those that every environment names


class Step:
    """One step: the passes over its sequences, the clipped gradient, the optimizer. Takes its
    batches from ``dataloader``, which is set before the first. Nothing in it asks the device for a
    number, so that the device never waits."""

    dataloader: Iterator[Tensor]

    def __init__(
        self, model: LlamaForCausalLM, recipe: TrainingRecipe, processes: PartialState
    ) -> None:
        self.recipe, self.processes = recipe, processes
        self.parameters = dict(model.named_parameters())
        self.optimizer = adamw(self.parameters.values(), recipe.optimizer)
        at_once = recipe.micro_batch_size * processes.num_processes
        self.passes = recipe.global_batch_size // at_once
        self.loss: nn.Module = _compiled(Loss(model, recipe.compute.precision), recipe.compute)
        if processes.num_processes > 1:
            self.loss = _data_parallel(self.loss, processes, recipe.compute)

    def __call__(self, number: int) -> tuple[Tensor, Tensor]:
        """Step ``number``, from 0: the mean loss of this process's sequences in nats a token, and
        the gradient's norm before clipping. Both are scalars on the device."""
        recipe, passes = self.recipe, self.passes
        share = learning_rate(number, recipe.steps, recipe.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * share
        total = torch.zeros((), device=self.processes.device)
        for part in range(passes):
            accumulates = self.processes.num_processes > 1 and part + 1 < passes
            with self.loss.no_sync() if accumulates else nullcontext():
                loss = self.loss(next(self.dataloader)) / passes
                loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(self.parameters.values(), recipe.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm

    @property
    def learning_rate(self) -> float:
        """Of the last step."""
        return self.optimizer.param_groups[0]["lr"]


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


def _data_parallel(
    loss: nn.Module, processes: PartialState, compute: Compute
) -> DistributedDataParallel:
    """Gradients are averaged during the backward pass: those of the last layers first where the
    model is compiled layer by layer, all of them at its end where it is one graph."""
    place = processes.device
    parallel = DistributedDataParallel(
        loss,
        device_ids=[place.index] if place.type == "cuda" else None,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,  # the same everywhere
    )
    if compute.travel == "bfloat16":
        parallel.register_comm_hook(None, bf16_compress_hook)
    return parallel


class Trainer:
    """One training: from the first step, or from the state in ``folder``, to its last.

    ``best`` is called with a model that is the best so far on the held-out texts; ``say`` is told
    each logged step in one line. Losses of the steps since the last logged one stay on the device
    until they are logged: asking for them would keep the device waiting.
    """

    def __init__(
        self,
        recipe: TrainingRecipe,
        model: LlamaForCausalLM,
        *,
        folder: Path,
        processes: PartialState,
        settings: str,
        evaluate: Callable[[LlamaForCausalLM, int], TrainingSample],
        best: Callable[[LlamaForCausalLM], object],
        say: Callable[[str], None],
    ) -> None:
        """``settings``: digest of all that shapes the run. The initial weights of ``model`` are
        replaced where the state has later ones. Raises TrainingError for another run's state."""
        self.recipe, self.model, self.processes = recipe, model, processes
        self.evaluate, self.best, self.say = evaluate, best, say
        self.path = folder / LAST
        self.step = Step(model, recipe, processes)
        self.progress = Progress(settings=settings)
        self._log: Log | None = None  # of the main process
        self._values: list[Tensor] = []  # [loss, gradient norm] of each step since the last log
        self._began = 0.0
        if self.path.exists():
            require_same(read_progress(self.path).settings, settings, folder)
            self.progress = load_state(self.path, self.step.parameters, self.step.optimizer)

    def train(
        self, source: Sequences, *, seed: int, log: Callable[[int], Log], stop_after: int | None
    ) -> Progress:
        """Take the steps that are left, or ``stop_after`` of them. ``log`` opens the log from a
        step on.

        Raises TrainingError where the loss is not finite or far above the lowest so far: the
        state of the last good step is kept.
        """
        recipe, progress, first = self.recipe, self.progress, self.progress.step
        last = min(recipe.steps, first + (stop_after or recipe.steps))
        self.step.dataloader = dataloader(source, recipe, self.processes, first=first, seed=seed)
        if self.processes.is_main_process:
            self._log = log(first or -1)
        own = digest_of([Path(__file__).parent])  # beside the modules that change numbers anywhere
        code = hashlib.sha256(f"{code_digest()} {own}".encode()).hexdigest()
        session = TrainingSession(
            first_step=first, last_step=first, seconds=0.0, processes=self.processes.num_processes,
            code=code, environment=environment(self.processes.device.type, LIBRARIES),
        )  # fmt: skip
        progress.sessions.append(session.model_dump(mode="json"))
        started = self._began = time.monotonic()
        try:
            if first == 0:
                self._evaluate()
            for number in range(first, last):
                if not progress.kernels and number >= SETTLED:
                    progress.kernels = attention_kernels(
                        lambda n=number: self._take(n), self.processes.device
                    )
                else:
                    self._take(number)
                done = progress.step = number + 1
                evaluates = done % recipe.watch.every == 0 or done == recipe.steps
                saves = done % recipe.save_every == 0 or done == last
                if done % recipe.log_every == 0 or evaluates or saves:
                    self._write_log()
                if evaluates:
                    self._evaluate()
                if saves:
                    seconds = round(time.monotonic() - started, 3)
                    progress.sessions[-1] |= {"last_step": done, "seconds": seconds}
                    if self.processes.is_main_process:
                        save_state(self.path, progress, self.step.parameters, self.step.optimizer)
                    self.processes.wait_for_everyone()
                    self._began = time.monotonic()
        finally:
            if self._log is not None:
                self._log.close()
        return progress

    def _take(self, number: int) -> None:
        self._values.append(torch.stack(self.step(number)))

    def _write_log(self) -> None:
        """The mean loss and the largest gradient; TrainingError where training has gone wrong."""
        recipe, progress, count = self.recipe, self.progress, len(self._values)
        if not count:
            return
        losses, norms = torch.stack(self._values, 1)
        values = torch.stack([losses.mean(), norms.max()])
        loss, norm = reduce(values, "mean").tolist()
        seconds = time.monotonic() - self._began
        self._values = []
        self._require_sane(loss, norm)
        progress.lowest_loss = min(loss, progress.lowest_loss or math.inf)
        if self._log is not None:
            step, speed = progress.step, count * recipe.batch.tokens / seconds
            peak = peak_tflops(progress.sessions[-1]["environment"]["hardware"])
            work = speed / self.processes.num_processes * flops_per_token(recipe.model)
            mfu = None if peak is None else work / (peak * 1e12)
            self._log.write(
                "step", step, tokens=step * recipe.batch.tokens, loss=loss, grad_norm=norm,
                learning_rate=self.step.learning_rate, tokens_per_s=speed, mfu=mfu,
            )  # fmt: skip
            left = timedelta(seconds=round((recipe.steps - step) * seconds / count))
            share = "" if mfu is None else f", {mfu:.1%} of peak"
            self.say(
                f"step {step:,} of {recipe.steps:,}: loss {loss:.3f}, gradient {norm:.2f}, "
                f"{speed:,.0f} tokens/s{share}, {left} left",
            )
        self._began = time.monotonic()

    def _require_sane(self, loss: float, norm: float) -> None:
        """Raises TrainingError for a loss that is not finite, or too far above the lowest."""
        step, lowest = self.progress.step, self.progress.lowest_loss
        if not (math.isfinite(loss) and math.isfinite(norm)):
            wrong = f"the loss is {loss}, the gradient's norm {norm}: training broke"
        elif lowest is not None and loss > lowest + self.recipe.watch.diverged:
            wrong = f"the loss is {loss:.3f}, after {lowest:.3f}: training diverged"
        else:
            return
        kept = "there is no earlier state yet"
        if self.path.exists():
            kept = f"the state of step {read_progress(self.path).step} is kept in "
            kept += str(self.path.parent)
        raise TrainingError(
            f"step {step}: {wrong}; lower the learning rate or warm up longer ({kept})"
        )

    def _evaluate(self) -> None:
        """Look at the model on the held-out texts, and keep it where it is the best so far."""
        progress = self.progress
        if self._log is not None:
            try:
                with deterministic(False):  # medians have no deterministic kernel
                    sample = self.evaluate(self.model, progress.step)
            except EvaluationError as error:
                raise TrainingError(f"step {progress.step}: on held-out text {error}") from None
            self._log.write("watch", **sample.model_dump())
            self.say(
                f"step {progress.step:,}: held-out loss {sample.loss:.3f}, sinks "
                f"{sample.sink_rate:.1%}, kurtosis {sample.kurtosis:.1f}, largest "
                f"{sample.largest:.1f}",
            )
            if progress.step and sample.loss < (progress.best_loss or math.inf):
                progress.best_loss, progress.best_step = sample.loss, progress.step
                self.best(self.model)
        self.processes.wait_for_everyone()
        self._began = time.monotonic()


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Within the body torch's operators, and the kernels that its compiler chooses, give the same
    bits every time, or raise where they cannot; not so where that is not ``wanted``."""
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    # The compiler measures kernels against each other, and the fastest may sum in another order.
    choosing = getattr(config, "deterministic", None)
    torch.use_deterministic_algorithms(wanted)
    torch.utils.deterministic.fill_uninitialized_memory = False  # none is read
    if choosing is not None:
        config.deterministic = wanted
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled
        if choosing is not None:
            config.deterministic = choosing
