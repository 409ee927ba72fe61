"""One training, from the first step or from where it stopped, to its last."""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaForCausalLM

from qbench.code import code_digest, digest_of
from qbench.errors import EvaluationError, TrainingError, UnavailableError
from qbench.machine import environment
from qbench.records import TrainingSession
from qbench.training.checkpoint import (
    LAST,
    Progress,
    load_state,
    read_progress,
    require_same,
    save_state,
)
from qbench.training.data import Sequences, Shard, dataloader
from qbench.training.evaluate import Evaluator
from qbench.training.log import Log
from qbench.training.model import (
    Loss,
    flops_per_token,
    learning_rate,
    optimizers,
    set_learning_rate,
)
from qbench.training.recipe import Compute, TrainingRecipe

SETTLED = 3  # steps before one is profiled: the first ones compile
LIBRARIES = ("accelerate", "triton")  # beside those that every environment names
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # read when cuBLAS starts
# TFLOP/s of a large bf16 matrix product, as measured, which the data sheet's figure is not.
PEAK = {"H200": 790.0}
# Ours (Triton and Gluon), and those that torch's scaled_dot_product_attention may choose. What the
# compiler makes is named triton_… after all that is fused in it, and is no kernel of attention.
ATTENTION = re.compile(
    r"^(?!triton_).*(attn_fwd|attn_bwd|hopper_bwd|attn_decode|flash|fmha|sdpa|attention)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """``index`` of ``count`` processes of one training, one on each GPU; each computes on
    ``device``."""

    device: torch.device
    index: int = 0
    count: int = 1

    @property
    def is_main_process(self) -> bool:
        """Whether this one writes and speaks."""
        return self.index == 0

    def mean(self, values: Tensor) -> Tensor:
        """Over all processes."""
        if self.count > 1:
            distributed.all_reduce(values)
            values /= self.count
        return values

    def barrier(self) -> None:
        """Wait until all are here."""
        if self.count > 1:
            distributed.barrier()


@contextmanager
def joined(device: str) -> Iterator[Processes]:
    """What torchrun's or accelerate's environment variables say; alone without them.

    Raises UnavailableError for a GPU that is not there.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        if local >= torch.cuda.device_count():
            raise UnavailableError(
                f"process {local} of this host has no GPU of its own: {torch.cuda.device_count()} "
                "are visible; say torchrun --nproc-per-node with at most that"
            )
        torch.cuda.set_device(local)
    if count == 1:
        yield Processes(device=torch.device(device))
        return
    place = torch.device(device, local) if device == "cuda" else torch.device(device)
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield Processes(device=place, index=distributed.get_rank(), count=count)
    finally:
        distributed.destroy_process_group()


class Step:
    """One step: the passes over its sequences, the clipped gradient, the optimizers. Takes its
    batches from ``dataloader``, which is set before the first. Nothing in it asks the device for a
    number, so that the device never waits."""

    dataloader: Iterator[Tensor]

    def __init__(
        self, model: LlamaForCausalLM, recipe: TrainingRecipe, processes: Processes
    ) -> None:
        self.recipe, self.processes = recipe, processes
        self.parameters = dict(model.named_parameters())
        self.optimizers = optimizers(self.parameters, recipe.optimizer, fused=True)
        self.shard = Shard(
            global_batch_size=recipe.global_batch_size,
            micro_batch_size=recipe.micro_batch_size,
            process=processes.index,
            processes=processes.count,
        )
        self.loss: nn.Module = _compiled(Loss(model, recipe.compute.precision), recipe.compute)
        if processes.count > 1:
            self.loss = _data_parallel(self.loss, processes, recipe.compute)

    def __call__(self, number: int) -> tuple[Tensor, Tensor]:
        """Step ``number``, from 0: the mean loss of this process's sequences in nats a token, and
        the gradient's norm before clipping. Both are scalars on the device."""
        recipe, passes = self.recipe, self.shard.passes
        set_learning_rate(self.optimizers, learning_rate(number, recipe.steps, recipe.schedule))
        total = torch.zeros((), device=self.processes.device)
        for part in range(passes):
            accumulates = self.processes.count > 1 and part + 1 < passes
            with self.loss.no_sync() if accumulates else nullcontext():
                loss = self.loss(next(self.dataloader)) / passes
                loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(self.parameters.values(), recipe.optimizer.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return total, norm

    @property
    def learning_rate(self) -> float:
        """Of AdamW, in the last step."""
        return self.optimizers[-1].param_groups[0]["lr"]


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
    loss: nn.Module, processes: Processes, compute: Compute
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
    if compute.reduce_dtype == "bfloat16":
        parallel.register_comm_hook(None, bf16_compress_hook)
    return parallel


@dataclass(kw_only=True, slots=True, eq=False)
class Run:
    """What a training works on. ``folder`` keeps its state; ``best`` is called with a model that
    is the best so far on the held-out texts; ``say`` is told each logged step in one line."""

    recipe: TrainingRecipe
    seed: int
    model: LlamaForCausalLM  # its initial weights are replaced where the state has later ones
    source: Sequences
    evaluator: Evaluator
    folder: Path
    processes: Processes
    settings: str  # digest of all that shapes the run
    log: Callable[[int], Log]  # from a step on
    best: Callable[[LlamaForCausalLM], None]
    say: Callable[[int, str], None]
    stop_after: int | None = None  # steps of this call


def train(run: Run) -> tuple[Progress, float | None]:
    """Train ``run.model`` to its last step; returns the progress and the last mean loss, None
    where no step was taken.

    Raises TrainingError where the loss is not finite or far above the lowest so far: the state
    of the last good step is kept.
    """
    recipe, processes, path = run.recipe, run.processes, run.folder / LAST
    step = Step(run.model, recipe, processes)
    progress = Progress(settings=run.settings)
    if path.exists():
        require_same(read_progress(path).settings, run.settings, run.folder)
        progress = load_state(path, step.parameters, step.optimizers)
    step.dataloader = dataloader(
        run.source, step.shard, first=progress.step, steps=recipe.steps, seed=run.seed,
        device=processes.device,
    )  # fmt: skip
    last = recipe.steps
    if run.stop_after is not None:
        last = min(last, progress.step + run.stop_after)
    window = _Window(run=run, progress=progress)
    began, first = time.monotonic(), progress.step
    progress.sessions.append({})
    try:
        _note(progress, processes, first, began)
        if first == 0:
            _evaluate(run, progress, window)
        for number in range(first, last):
            if not progress.kernels and number >= SETTLED:
                progress.kernels = attention_kernels(
                    lambda n=number: window.add(*step(n)), processes.device
                )
            else:
                window.add(*step(number))
            progress.step = number + 1
            done, ends = progress.step, progress.step == last
            evaluates = done % recipe.watch.every == 0 or done == recipe.steps
            saves = done % recipe.save_every == 0 or ends
            if done % recipe.log_every == 0 or evaluates or saves:
                window.close(step.learning_rate)
            if evaluates:
                _evaluate(run, progress, window)
            if saves:
                _note(progress, processes, first, began)
                if processes.is_main_process:
                    save_state(path, progress, step.parameters, step.optimizers)
                processes.barrier()
                window.began = time.perf_counter()
    finally:
        if window.log is not None:
            window.log.close()
    return progress, window.mean


def _note(progress: Progress, processes: Processes, first: int, began: float) -> None:
    """This stretch of the training, in the progress that is kept."""
    if not progress.sessions[-1]:
        session = TrainingSession(
            first_step=first,
            last_step=first,
            seconds=0.0,
            processes=processes.count,
            code=training_code(),
            environment=environment(processes.device.type, LIBRARIES),
        )
        progress.sessions[-1] = session.model_dump(mode="json")
    seconds = round(time.monotonic() - began, 3)
    progress.sessions[-1] |= {"last_step": progress.step, "seconds": seconds}


@dataclass(kw_only=True, slots=True, eq=False)
class _Window:
    """The steps since the last logged one. Their losses stay on the device until it is closed:
    asking for them would keep the device waiting."""

    run: Run
    progress: Progress
    log: Log | None = None  # of the main process
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    mean: float | None = None
    began: float = 0.0

    def __post_init__(self) -> None:
        if self.run.processes.is_main_process:
            self.log = self.run.log(self.progress.step or -1)
        self.began = time.perf_counter()

    def add(self, loss: Tensor, norm: Tensor) -> None:
        self.losses.append(loss)
        self.norms.append(norm)

    def close(self, rate: float) -> None:
        """Log the mean; TrainingError where training has gone wrong."""
        if not self.losses:
            return
        run, step, count = self.run, self.progress.step, len(self.losses)
        pair = torch.stack([torch.stack(self.losses).mean(), torch.stack(self.norms).max()])
        mean, norm = run.processes.mean(pair).tolist()
        seconds = time.perf_counter() - self.began
        self.losses, self.norms = [], []
        _require_sane(mean, norm, run, self.progress)
        self.mean = mean
        lowest = self.progress.lowest_loss
        self.progress.lowest_loss = mean if lowest is None else min(lowest, mean)
        if self.log is not None:
            batch, steps = run.recipe.batch.tokens, run.recipe.steps
            speed = count * batch / seconds
            peak = peak_tflops(self.progress.sessions[-1]["environment"]["hardware"])
            work = speed / run.processes.count * flops_per_token(run.recipe.model)
            mfu = None if peak is None else work / (peak * 1e12)
            self.log.write(
                "step", step, tokens=step * batch, loss=mean, grad_norm=norm, learning_rate=rate,
                tokens_per_s=speed, mfu=mfu,
            )  # fmt: skip
            left = _duration((steps - step) * seconds / count)
            share = "" if mfu is None else f", {mfu:.1%} of peak"
            run.say(
                step,
                f"step {step:,} of {steps:,}: loss {mean:.3f}, gradient {norm:.2f}, "
                f"{speed:,.0f} tokens/s{share}, {left} left",
            )
        self.began = time.perf_counter()


def _require_sane(mean: float, norm: float, run: Run, progress: Progress) -> None:
    """Raises TrainingError for a loss that is not finite, or too far above the lowest."""
    path, step, lowest = run.folder / LAST, progress.step, progress.lowest_loss
    kept = "there is no earlier state yet"
    if path.exists():
        kept = f"the state of step {read_progress(path).step} is kept in {run.folder}"
    if not (math.isfinite(mean) and math.isfinite(norm)):
        raise TrainingError(
            f"step {step}: the loss is {mean}, the gradient's norm {norm}: training broke; "
            f"lower the learning rate or warm up longer ({kept})"
        )
    if lowest is not None and mean > lowest + run.recipe.watch.diverged:
        raise TrainingError(
            f"step {step}: the loss is {mean:.3f}, after {lowest:.3f}: training diverged; "
            f"lower the learning rate or warm up longer ({kept})"
        )


def _evaluate(run: Run, progress: Progress, window: _Window) -> None:
    """Look at the model on the held-out texts, and keep it where it is the best so far."""
    if window.log is not None:
        try:
            with deterministic(False):  # medians have no deterministic kernel
                sample = run.evaluator.evaluate(run.model, progress.step)
        except EvaluationError as error:
            raise TrainingError(f"step {progress.step}: on held-out text {error}") from None
        window.log.write("watch", **sample.model_dump())
        run.say(
            progress.step,
            f"step {progress.step:,}: held-out loss {sample.loss:.3f}, sinks {sample.sink_rate:.1%}"
            f", kurtosis {sample.kurtosis:.1f}, largest {sample.largest:.1f}",
        )
        if progress.step and (progress.best_loss is None or sample.loss < progress.best_loss):
            progress.best_loss, progress.best_step = sample.loss, progress.step
            run.best(run.model)
    run.processes.barrier()
    window.began = time.perf_counter()


def settle_workspace() -> None:
    """Before anything is computed on a GPU: without it cuBLAS may sum in another order from one
    process to the next. What the user set stays."""
    os.environ.setdefault(WORKSPACE, ":4096:8")


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Within the body torch's operators, and the kernels that its compiler chooses, give the same
    bits every time, or raise where they cannot; not so where that is not ``wanted``."""
    from torch._inductor import config  # imports the compiler, which few need

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


def attention_kernels(step: Callable[[], None], device: torch.device) -> list[str]:
    """Names of the attention kernels that ``step`` launches on a GPU, sorted; on a CPU, where
    none is launched, ``["none"]``. The step is done once."""
    if device.type != "cuda":
        step()
        return ["none"]
    from torch.profiler import ProfilerActivity, profile

    # Nothing is accumulated in one cycle; without it torch 2.11 warns of events that it clears.
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        step()
        torch.cuda.synchronize()
    names = {event.key for event in seen.key_averages() if event.self_device_time_total > 0}
    return sorted(name[:120] for name in names if ATTENTION.search(name))


def peak_tflops(hardware: str) -> float | None:
    """Of a GPU by its name; None for one that was not measured."""
    return next((rate for name, rate in PEAK.items() if name in hardware), None)


def training_code() -> str:
    """A digest of the modules that change numbers anywhere, and of a training's: 64 hexadecimal
    digits."""
    own = digest_of([Path(__file__).parent])
    return hashlib.sha256(f"{code_digest()} {own}".encode()).hexdigest()


def _duration(seconds: float) -> str:
    """``1:02:03`` or ``4:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
