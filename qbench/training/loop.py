"""Train all runs of a recipe, every seed with every attention function, each from its first step or
its saved state to its last step."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from filelock import FileLock, Timeout
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from qbench.analysis.measure import measure
from qbench.errors import EvaluationError, TrainingError, UnavailableError
from qbench.files import clean_temporaries, code_digest, digest_of, write_atomically
from qbench.machine import environment
from qbench.records import (
    TRAINING_FILE,
    TrainedOn,
    Training,
    TrainingSample,
    TrainingSession,
    write_record,
)
from qbench.training.checkpoint import Run
from qbench.training.data import TokenFiles, dataloader, require_data, sequences, watched_rows
from qbench.training.model import (
    adamw,
    attention_kernels,
    deterministic,
    initial_model,
    learning_rate,
    parallel_loss,
    utilization,
)
from qbench.training.training_recipe import TrainingRecipe

BEST = "best"
SETTLED = 3  # steps before one is profiled: the first ones compile
WARM = 5  # steps before one is captured
LIBRARIES = ("accelerate", "triton")  # beside those that every environment names
BATCH_TOKENS = 8192  # of held-out texts that are read at once
SINK = "0.3"  # ε of the sink rates


class Step:
    """One optimizer step: forward and backward passes, the clipped gradient, the optimizer. It
    reads no number from the device, so that the device never waits. A compiled step on one GPU is
    captured as a CUDA graph after its warm-up, all but the optimizer: launching its 1,500 kernels
    one by one takes longer than they do. The graph gives the same bits."""

    def __init__(
        self, model: LlamaForCausalLM, recipe: TrainingRecipe, processes: PartialState
    ) -> None:
        self.recipe, self.processes = recipe, processes
        self.parameters = dict(model.named_parameters())
        self.optimizer = adamw(self.parameters.values(), recipe.optimizer)
        self.loss = parallel_loss(model, recipe.compute, processes)
        single_process = processes.num_processes == 1
        captures = single_process and processes.device.type == "cuda" and recipe.compute.compile
        self._eager_steps = WARM if captures else math.inf  # left
        self._graph: torch.cuda.CUDAGraph | None = None
        self._rows: list[Tensor] = []  # what the graph reads: of each pass
        self._results: tuple[Tensor, Tensor]  # what it writes

    def __call__(self, number: int, batches: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
        """Take step ``number``, from 0. Return the mean loss of this process's sequences in nats
        per token, and the gradient's norm before clipping, as scalars on the device."""
        recipe, processes = self.recipe, self.processes.num_processes
        passes = recipe.global_batch_size // (recipe.batch.sequences * processes)
        rate = recipe.optimizer.learning_rate
        for group in self.optimizer.param_groups:
            group["lr"] = rate * learning_rate(number, recipe.steps, recipe.schedule)
        rows = [next(batches) for _ in range(passes)]
        if self._eager_steps > 0:
            self._eager_steps -= 1
            results = self._set_gradients(rows)
        else:
            results = self._replay(rows)
        self.optimizer.step()
        return results

    def _set_gradients(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Set the parameters' gradients to the clipped gradients of the mean loss over ``rows``;
        return the loss and the norm before clipping."""
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.processes.device)
        for part, batch in enumerate(rows):
            accumulates = self.processes.num_processes > 1 and part + 1 < len(rows)
            with self.loss.no_sync() if accumulates else nullcontext():
                loss = self.loss(batch) / len(rows)
                loss.backward()
            total += loss.detach()
        return total, clip_grad_norm_(self.parameters.values(), self.recipe.optimizer.clip)

    def _replay(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Compute ``_set_gradients`` by a CUDA graph; the first call captures it."""
        if self._graph is None:
            self._rows, self._graph = [row.clone() for row in rows], torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._results = self._set_gradients(self._rows)
        for row, new in zip(self._rows, rows, strict=True):
            row.copy_(new)
        self._graph.replay()
        return self._results


class Trainer:
    """Trains one run. ``log`` is called with one line per logged step. Losses stay on the device
    until they are logged, since reading them would make the device wait."""

    def __init__(self, run: Run, *, processes: PartialState, log: Callable[[str], None]) -> None:
        """Build the model and restore the saved state, if there is one. Raises TrainingError if the
        state has other settings or held-out texts, DataError for too few held-out texts,
        UnavailableError if the attention implementation cannot run."""
        recipe = run.recipe
        self.run, self.processes, self.print = run, processes, log
        self.model, self.attention = initial_model(
            recipe.model, normalizer=run.normalizer, seed=run.seed, device=processes.device,
            attention=recipe.compute.attention, **run.files.about.special,
        )  # fmt: skip
        log(f"{self.model.num_parameters():,} parameters, {self.attention}")
        self.held_out = torch.tensor(watched_rows(recipe, run.files))
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(run.files.folder)
        self.step = Step(self.model, recipe, processes)
        self.progress = run.load_state(self.step.parameters, self.step.optimizer)
        texts = hashlib.sha256(self.held_out.numpy()).hexdigest()
        if self.progress.held_out not in (None, texts):
            raise TrainingError(
                "watch.samples, watch.length: the state was evaluated on other held-out texts, "
                f"whose losses do not compare; set them back, or remove {run.state} to train from "
                "the start"
            )
        self.progress.held_out = texts
        if self.progress.step:
            log(f"continues from step {self.progress.step:,}")
        self._values: list[Tensor] = []  # [loss, gradient norm] of each step since the last log
        self._began = 0.0

    def train(self, stop_after: int | None) -> None:
        """Take the steps that are left, or at most ``stop_after`` of them, and save the state.
        Raises TrainingError if the loss is not finite or far above the lowest so far."""
        run, recipe, progress = self.run, self.run.recipe, self.progress
        first = progress.step
        last = min(recipe.steps, first + (stop_after or recipe.steps))
        batches = dataloader(
            sequences(recipe, run.files), recipe, self.processes, first=first, seed=run.seed
        )
        # beside the modules that change numbers anywhere
        training_code = digest_of([Path(__file__).parent])
        code = hashlib.sha256(f"{code_digest()} {training_code}".encode()).hexdigest()
        session = TrainingSession(
            first_step=first, last_step=first, seconds=0.0, processes=self.processes.num_processes,
            code=code, environment=environment(self.processes.device.type, LIBRARIES),
        )  # fmt: skip
        progress.sessions.append(session)
        if self.processes.is_main_process:
            lines = "".join(json.dumps(line) + "\n" for line in progress.log)
            write_atomically(run.log, lines.encode())
        started = self._began = time.monotonic()
        if first == 0:
            self._evaluate()
        for number in range(first, last):
            take = partial(self._take, number, batches)
            if not progress.kernels and number >= SETTLED:
                progress.kernels = attention_kernels(take, self.processes.device)
            else:
                take()
            done = progress.step = number + 1
            evaluates = done % recipe.watch.every == 0 or done == recipe.steps
            saves = done % recipe.save_every == 0 or done == last
            if done % recipe.log_every == 0 or evaluates or saves:
                self._write_log()
            if evaluates:
                self._evaluate()
            if saves:
                seconds = round(time.monotonic() - started, 3)
                update = {"last_step": done, "seconds": seconds}
                progress.sessions[-1] = session.model_copy(update=update)
                if self.processes.is_main_process:
                    run.save_state(progress, self.step.parameters, self.step.optimizer)
                self.processes.wait_for_everyone()
                self._began = time.monotonic()

    def _take(self, number: int, batches: Iterator[Tensor]) -> None:
        """Take step ``number`` and keep its loss and gradient norm for the log."""
        self._values.append(torch.stack(self.step(number, batches)))

    def _append(self, kind: str, step: int, **values: float | int | None) -> None:
        """Add a line to the log, in memory and in its file."""
        self.progress.log.append({"kind": kind, "step": step, **values})
        with self.run.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.progress.log[-1]) + "\n")

    def _write_log(self) -> None:
        """Log loss and gradient since the last line. Raises TrainingError if training
        went wrong, see ``_require_sane``."""
        recipe, progress, count = self.run.recipe, self.progress, len(self._values)
        losses, norms = torch.stack(self._values, 1)
        values = torch.stack([losses.mean(), norms.max()])
        loss, norm = reduce(values, "mean").tolist()
        seconds = time.monotonic() - self._began
        self._values = []
        self._require_sane(loss, norm)
        progress.lowest_loss = min(loss, _or_inf(progress.lowest_loss))
        if self.processes.is_main_process:
            step, speed = progress.step, count * recipe.batch.tokens / seconds
            mfu = utilization(
                self.model, recipe.model.context, speed / self.processes.num_processes,
                progress.sessions[-1].environment.hardware,
            )  # fmt: skip
            self._append(
                "step", step, tokens=step * recipe.batch.tokens, loss=loss, grad_norm=norm,
                learning_rate=self.step.optimizer.param_groups[0]["lr"], tokens_per_s=speed,
                mfu=mfu,
            )  # fmt: skip
            left = timedelta(seconds=round((recipe.steps - step) * seconds / count))
            share = "" if mfu is None else f", {mfu:.1%} of peak"
            self.print(
                f"step {step:,} of {recipe.steps:,}: loss {loss:.3f}, gradient {norm:.2f}, "
                f"{speed:,.0f} tokens/s{share}, {left} left"
            )
        self._began = time.monotonic()

    def _require_sane(self, loss: float, norm: float) -> None:
        """Raise TrainingError if loss or gradient norm is not finite, or if the loss is more than
        ``watch.diverged`` above the lowest."""
        step, lowest = self.progress.step, self.progress.lowest_loss
        if not (math.isfinite(loss) and math.isfinite(norm)):
            wrong = f"the loss is {loss}, the gradient's norm {norm}: training broke"
        elif lowest is not None and loss > lowest + self.run.recipe.watch.diverged:
            wrong = f"the loss is {loss:.3f}, after {lowest:.3f}: training diverged"
        else:
            return
        kept = "there is no earlier state yet"
        if saved := self.progress.sessions[-1].last_step:
            kept = f"the state of step {saved} is kept in {self.run.state.parent}"
        raise TrainingError(
            f"step {step}: {wrong}; lower the learning rate or warm up longer ({kept})"
        )

    def _evaluate(self) -> None:
        """Measure the model on the held-out texts, and save it if it is the best so far. It is
        measured as ``qbench analyze`` would measure the checkpoint: a copy with weights rounded to
        bfloat16. Raises TrainingError if the model gives no numbers."""
        progress, step = self.progress, self.progress.step
        if self.processes.is_main_process:
            dtype = getattr(torch, self.run.recipe.compute.precision)
            copied = copy.deepcopy(self.model).eval().requires_grad_(False)
            for parameter in copied.parameters():  # not the buffers: no checkpoint rounds these
                parameter.data = parameter.data.bfloat16().to(dtype)  # as the checkpoint has it
            batch = max(1, BATCH_TOKENS // self.held_out.shape[1])
            try:
                with deterministic(False):  # medians have no deterministic kernel
                    measured = measure(
                        copied, self.held_out, tokenizer=self.tokenizer, linears=(), batch=batch
                    )
            except EvaluationError as error:
                raise TrainingError(f"step {step}, held-out text: {error}") from None
            sink, hidden = measured.sinks[0], measured.hidden
            sample = TrainingSample(
                step=step,
                loss=math.log(measured.perplexity),
                sink_rate=sink.rates[SINK],
                sink_rate_gu=sink.rates_gu[SINK],
                kurtosis=hidden.kurtosis,
                largest=max(abs(hidden.minimum), abs(hidden.maximum)),
            )
            self._append("watch", **sample.model_dump())
            self.print(
                f"step {step:,}: held-out loss {sample.loss:.3f}, sinks in {sample.sink_rate:.1%} "
                f"of heads, kurtosis {sample.kurtosis:.1f}, largest activation {sample.largest:.1f}"
            )
            if step and sample.loss < _or_inf(progress.best_loss):
                progress.best_loss, progress.best_step = sample.loss, step
                self.run.save(self.model, self.run.folder / BEST)
        self.processes.wait_for_everyone()
        self._began = time.monotonic()


def _or_inf(loss: float | None) -> float:
    return math.inf if loss is None else loss


# --- train all runs of a recipe, every seed with every attention function, and write their records


@contextmanager
def joined(device: str) -> Iterator[PartialState]:
    """Join the processes that torchrun or accelerate started, as their environment variables say,
    and yield the state; a single process without them. ``device``: "cpu" or "cuda". Call it before
    anything is computed on a GPU: without a fixed workspace cuBLAS may sum in another order from
    one process to the next. Raises UnavailableError for a missing GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda" and local >= torch.cuda.device_count():
        raise UnavailableError(
            f"process {local} of this host has no GPU: {torch.cuda.device_count()} are visible; "
            f"start torchrun with --nproc-per-node {torch.cuda.device_count()} or less"
        )
    PartialState._reset_state()  # of another device, earlier in this process
    processes = PartialState(cpu=device == "cpu")
    try:
        yield processes
    finally:
        processes.destroy_process_group()


def train_recipe(
    recipe: TrainingRecipe,
    files: TokenFiles,
    out: Path,
    *,
    processes: PartialState,
    log: Callable[[str], None],
    stop_after: int | None = None,
) -> list[Training]:
    """Train the runs that are not finished, or ``stop_after`` steps more of each. Each run's
    checkpoint goes to ``out/<normalizer>-seed<n>``. ``log`` gets lines with the run's name. Returns
    the records of all runs that are finished now, also of those that were before. Raises
    RecipeError or DataError if the data do not fit, TrainingError if a run breaks, is trained by
    another process, or was begun with other settings."""
    require_data(recipe, files, processes=processes.num_processes)
    records = []
    for normalizer, seed in recipe.runs():
        name = run_name(normalizer, seed)
        run = Run(recipe=recipe, files=files, normalizer=normalizer, seed=seed, folder=out / name)
        if record := run.finished():
            log(f"{name}: trained already")
            records.append(record)
            continue
        lock = _locked(run.folder) if processes.is_main_process else nullcontext()
        with lock, deterministic(recipe.compute.deterministic):
            trainer = Trainer(
                run, processes=processes, log=lambda line, name=name: log(f"{name}: {line}")
            )
            trainer.train(stop_after)
            if trainer.progress.step == recipe.steps:
                records.append(_record(trainer))
    return records


def run_name(normalizer: str, seed: int | str) -> str:
    """Return the name of a run's folder, ``<normalizer>-seed<seed>``."""
    return f"{normalizer}-seed{seed}"


def _record(trainer: Trainer) -> Training:
    """Return the record of a finished training; the main process writes it and the checkpoint."""
    run, progress, model = trainer.run, trainer.progress, trainer.model
    recipe, about = run.recipe, run.files.about
    losses = [line["loss"] for line in progress.log if line["kind"] == "step"]
    record = Training(
        name=recipe.name,
        normalizer=run.normalizer,
        seed=run.seed,
        settings=recipe.settings(),
        settings_digest=progress.settings,
        data=TrainedOn(
            digest=about.digest,
            tokens=about.train.tokens,
            documents=about.train.documents,
            tokenizer=about.tokenizer,
            sources=tuple(source.name for source in about.sources),
            licences=about.licences,
        ),
        attention=trainer.attention,
        kernels=tuple(progress.kernels),
        compiled=recipe.compute.compile or "no",
        parameters=model.num_parameters(),
        steps=progress.step,
        tokens=progress.step * recipe.batch.tokens,
        final_loss=losses[-1] if losses else None,
        best_step=progress.best_step,
        best_loss=progress.best_loss,
        watched=tuple(
            TrainingSample(**{key: line[key] for key in TrainingSample.model_fields})
            for line in progress.log
            if line["kind"] == "watch"
        ),
        sessions=tuple(progress.sessions),
        finished=datetime.now(UTC),
    )
    if trainer.processes.is_main_process:
        run.save(model, run.folder)
        record = record.model_copy(update={"files": run.file_digests()})
        write_record(run.folder / TRAINING_FILE, record)
    trainer.processes.wait_for_everyone()
    return record


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``. Raises TrainingError if another process trains there."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            clean_temporaries(folder)
            yield
    except Timeout:
        raise TrainingError(
            f"{folder}: another process trains there; wait for it or stop it"
        ) from None
