"""One training, from the first step or from where it stopped, to its last."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from qbench.errors import EvaluationError, TrainingError
from qbench.machine import environment
from qbench.records import TrainingSample, TrainingSession
from qbench.training.code import training_code
from qbench.training.determinism import deterministic
from qbench.training.feed import batches
from qbench.training.kernels import attention_kernels
from qbench.training.log import Log
from qbench.training.order import Sequences
from qbench.training.processes import Processes
from qbench.training.progress import LAST, Progress, read_progress, require_same
from qbench.training.recipe import TrainingRecipe
from qbench.training.shape import flops_per_token
from qbench.training.speed import duration, share_of_peak
from qbench.training.state import load_state, save_state
from qbench.training.step import Step
from qbench.training.watch import Watched

SETTLED = 3  # steps before one is profiled: the first ones compile
LIBRARIES = ("accelerate", "triton")  # beside those that every environment names


@dataclass(kw_only=True, slots=True, eq=False)
class Run:
    """What a training works on. ``folder`` keeps its state; ``best`` is called with a model that
    is the best so far on the held-out texts; ``say`` is told each logged step in one line."""

    recipe: TrainingRecipe
    seed: int
    model: LlamaForCausalLM  # its initial weights are replaced where the state has later ones
    source: Sequences
    watched: Watched
    folder: Path
    processes: Processes
    settings: str  # digest of all that shapes the run
    log: Callable[[int], Log]  # from a step on
    best: Callable[[LlamaForCausalLM], None]
    say: Callable[[int, str], None]
    stop_after: int | None = None  # steps of this call


def train(run: Run) -> tuple[Progress, float | None]:
    """Train ``run.model`` to its last step; returns the progress and the last mean loss.

    Raises TrainingError where the loss is not finite or far above the lowest so far: the state
    of the last good step is kept.
    """
    recipe, processes = run.recipe, run.processes
    step = Step(run.model, recipe, processes)
    progress = _resumed(run, step)
    step.feed = batches(
        run.source, step.share, first=progress.step, steps=recipe.steps, seed=run.seed,
        device=processes.device,
    )  # fmt: skip
    window = _Window(run, progress)
    end = recipe.steps
    if run.stop_after is not None:
        end = min(end, progress.step + run.stop_after)
    try:
        _steps(run, step, progress, window, end)
    finally:
        window.close_log()
    return progress, window.mean


def _steps(run: Run, step: Step, progress: Progress, window: _Window, end: int) -> None:
    """From where the progress is to ``end``: log, look and save as the recipe says."""
    recipe, processes = run.recipe, run.processes
    session = Session(progress, processes)

    def take(number: int) -> None:
        window.add(*step(number))

    if progress.step == 0:
        _watch(run, progress, window)
    for number in range(progress.step, end):
        if not progress.kernels and number >= SETTLED:
            progress.kernels = attention_kernels(lambda n=number: take(n), processes.device)
        else:
            take(number)
        progress.step = number + 1
        if progress.step % recipe.log_every == 0 or progress.step == end:
            window.close(step.learning_rate)
        if progress.step % recipe.watch.every == 0 or progress.step == recipe.steps:
            window.close(step.learning_rate)
            _watch(run, progress, window)
        if progress.step % recipe.save_every == 0 or progress.step == end:
            window.close(step.learning_rate)
            session.note()
            if processes.first:
                save_state(run.folder / LAST, progress, step.parameters, step.optimizers)
            processes.wait()
            window.resume_clock()


def _resumed(run: Run, step: Step) -> Progress:
    path = run.folder / LAST
    if not path.exists():
        return Progress(settings=run.settings)
    progress = load_state(path, step.parameters, step.optimizers)
    require_same(progress.settings, run.settings, run.folder)
    return progress


class Session:
    """This stretch of the training, in the progress that is kept."""

    def __init__(self, progress: Progress, processes: Processes) -> None:
        self.progress, self.began = progress, time.monotonic()
        first = TrainingSession(
            first_step=progress.step,
            last_step=progress.step,
            seconds=0.0,
            processes=processes.count,
            code=training_code(),
            environment=environment(processes.device.type, LIBRARIES),
        )
        progress.sessions.append(first.model_dump(mode="json"))

    def note(self) -> None:
        """How far it is by now."""
        seconds = round(time.monotonic() - self.began, 3)
        self.progress.sessions[-1] |= {"last_step": self.progress.step, "seconds": seconds}


class _Window:
    """The steps since the last logged one. Their losses stay on the device until it is closed:
    asking for them would keep the device waiting."""

    def __init__(self, run: Run, progress: Progress) -> None:
        self.run, self.progress = run, progress
        self.log = run.log(progress.step or -1) if run.processes.first else None
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.mean: float | None = None
        self.work = flops_per_token(run.recipe.model)
        self.began = time.perf_counter()

    def add(self, loss: Tensor, norm: Tensor) -> None:
        self.losses.append(loss)
        self.norms.append(norm)

    def close(self, rate: float) -> None:
        """Log the mean; TrainingError where training has gone wrong."""
        if not self.losses:
            return
        recipe, step, count = self.run.recipe, self.progress.step, len(self.losses)
        pair = torch.stack([torch.stack(self.losses).mean(), torch.stack(self.norms).max()])
        mean, norm = self.run.processes.mean(pair).tolist()
        seconds = time.perf_counter() - self.began
        self.losses, self.norms = [], []
        self._judge(mean, norm, step)
        self.mean = mean
        lowest = self.progress.lowest_loss
        self.progress.lowest_loss = mean if lowest is None else min(lowest, mean)
        speed = count * recipe.batch.tokens / seconds
        processes = self.run.processes.count
        name = self.progress.sessions[-1]["environment"]["hardware"]
        used = share_of_peak(speed / processes, self.work, name)
        if self.log is not None:
            self.log.write(
                "step", step, tokens=step * recipe.batch.tokens, loss=mean, grad_norm=norm,
                learning_rate=rate, tokens_per_s=speed, mfu=used,
            )  # fmt: skip
            left = duration((recipe.steps - step) * seconds / count)
            share = "" if used is None else f", {used:.1%} of peak"
            self.run.say(
                step,
                f"step {step:,} of {recipe.steps:,}: loss {mean:.3f}, gradient {norm:.2f}, "
                f"{speed:,.0f} tokens/s{share}, {left} left",
            )
        self.resume_clock()

    def close_log(self) -> None:
        if self.log is not None:
            self.log.close()

    def resume_clock(self) -> None:
        self.began = time.perf_counter()

    def _judge(self, mean: float, norm: float, step: int) -> None:
        lowest, limit = self.progress.lowest_loss, self.run.recipe.watch.diverged
        path = self.run.folder / LAST
        kept = "there is no earlier state yet"
        if path.exists():
            kept = f"the state of step {read_progress(path).step} is kept in {self.run.folder}"
        if not (math.isfinite(mean) and math.isfinite(norm)):
            raise TrainingError(
                f"step {step}: the loss is {mean}, the gradient's norm {norm}: training broke; "
                f"lower the learning rate or warm up longer ({kept})"
            )
        if lowest is not None and mean > lowest + limit:
            raise TrainingError(
                f"step {step}: the loss is {mean:.3f}, after {lowest:.3f}: training diverged; "
                f"lower the learning rate or warm up longer ({kept})"
            )


def _watch(run: Run, progress: Progress, window: _Window) -> None:
    """Look at the model on the held-out texts, and keep it where it is the best so far."""
    if run.processes.first:
        try:
            with deterministic(False):  # medians have no deterministic kernel
                sample: TrainingSample = run.watched.look(run.model, progress.step)
        except EvaluationError as error:
            raise TrainingError(f"step {progress.step}: on held-out text {error}") from None
        assert window.log is not None, "the first process writes"
        window.log.write("watch", **sample.model_dump())
        run.say(
            progress.step,
            f"step {progress.step:,}: held-out loss {sample.loss:.3f}, sinks {sample.sink_rate:.1%}"
            f", kurtosis {sample.kurtosis:.1f}, largest {sample.largest:.1f}",
        )
        if progress.step and (progress.best_loss is None or sample.loss < progress.best_loss):
            progress.best_loss, progress.best_step = sample.loss, progress.step
            run.best(run.model)
    run.processes.wait()
    window.resume_clock()
