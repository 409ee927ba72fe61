"""One training, from the first step or from where it stopped, to its last."""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor
from torch._inductor import config
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from qbench.analysis.measure import measure
from qbench.code import code_digest, digest_of
from qbench.errors import EvaluationError, TrainingError
from qbench.machine import environment
from qbench.records import TrainingSample, TrainingSession, canonical
from qbench.training.checkpoint import Progress, load_state, save_checkpoint, save_state
from qbench.training.data import TokenFiles, dataloader, first_token, sequences, watched_rows
from qbench.training.log import Log, open_trackers, read_log
from qbench.training.model import (
    Step,
    attention_kernels,
    checkpoint_config,
    initial_model,
    utilization,
)
from qbench.training.recipe import TrainingRecipe

STATE, LAST, LOG, BEST = "state", "last.safetensors", "log.jsonl", "best"
SETTLED = 3  # steps before one is profiled: the first ones compile
LIBRARIES = ("accelerate", "triton")  # beside those that every environment names
BATCH_TOKENS = 8192  # of held-out texts that are read at once
SINK = "0.3"  # ε of the sink rates


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training of a recipe, and the folder that all of it goes to."""

    recipe: TrainingRecipe
    files: TokenFiles
    normalizer: str
    seed: int
    folder: Path

    @property
    def settings_digest(self) -> str:
        """Of all that shapes it: a state goes on only under the same."""
        parts = {
            "settings": self.recipe.settings(),
            "data": self.files.about.digest,
            "normalizer": self.normalizer,
            "seed": self.seed,
        }
        return hashlib.sha256(canonical(parts)).hexdigest()

    @property
    def tokens(self) -> dict[str, int | None]:
        """The ids of bos, eos and pad."""
        about = self.files.about
        return {"bos": about.bos, "eos": about.eos, "pad": about.pad}

    def save(self, model: LlamaForCausalLM, folder: Path) -> dict[str, str]:
        """Write ``model`` as a checkpoint; returns the SHA-256 of its file of weights by name."""
        return save_checkpoint(
            model, folder, tokenizer=self.files.folder, first=first_token(self.recipe, self.files),
            config=checkpoint_config(self.recipe.model, self.normalizer, **self.tokens),
        )  # fmt: skip


class Trainer:
    """One training: from the first step, or from the state in its folder, to its last.

    ``say`` is told each logged step in one line. Losses of the steps since the last logged one
    stay on the device until they are logged: asking for them would keep the device waiting.
    """

    def __init__(self, run: Run, *, processes: PartialState, say: Callable[[str], None]) -> None:
        """Raises TrainingError for a state of other settings, DataError for too few held-out
        texts, UnavailableError where the attention cannot be had."""
        recipe = run.recipe
        self.run, self.processes, self.say = run, processes, say
        self.model, self.attention = initial_model(
            recipe.model, normalizer=run.normalizer, seed=run.seed, device=processes.device,
            attention=recipe.compute.attention, **run.tokens,
        )  # fmt: skip
        say(f"{self.model.num_parameters():,} parameters, {self.attention}")
        self.watched = torch.tensor(watched_rows(recipe, run.files))
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(run.files.folder)
        self.step = Step(self.model, recipe, processes)
        self.state = run.folder / STATE / LAST
        self.progress = Progress(settings=run.settings_digest)
        self._saved: int | None = None  # the step of the state that is there
        self._log: Log | None = None  # of the main process
        self._values: list[Tensor] = []  # [loss, gradient norm] of each step since the last log
        self._began = 0.0
        if self.state.exists():
            self.progress = load_state(
                self.state, run.settings_digest, self.step.parameters, self.step.optimizer
            )
            self._saved = step = self.progress.step
            log = run.folder / STATE / LOG
            if not self.progress.log and log.is_file():  # the state of an older qbench
                self.progress.log = [line for line in read_log(log) if line["step"] <= step]

    def train(self, *, trackers: Sequence[str], stop_after: int | None) -> Progress:
        """Take the steps that are left, or ``stop_after`` of them.

        Raises TrainingError where the loss is not finite or far above the lowest so far: the
        state of the last good step is kept.
        """
        run, recipe, progress = self.run, self.run.recipe, self.progress
        first = progress.step
        last = min(recipe.steps, first + (stop_after or recipe.steps))
        self.step.dataloader = dataloader(
            sequences(recipe, run.files), recipe, self.processes, first=first, seed=run.seed
        )
        if self.processes.is_main_process:
            opened = open_trackers(trackers, run.folder, recipe.settings())
            self._log = Log(run.folder / STATE / LOG, progress.log, opened)
        own = digest_of([Path(__file__).parent])  # beside the modules that change numbers anywhere
        code = hashlib.sha256(f"{code_digest()} {own}".encode()).hexdigest()
        session = TrainingSession(
            first_step=first, last_step=first, seconds=0.0, processes=self.processes.num_processes,
            code=code, environment=environment(self.processes.device.type, LIBRARIES),
        )  # fmt: skip
        progress.sessions.append(session)
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
                    update = {"last_step": done, "seconds": seconds}
                    progress.sessions[-1] = session.model_copy(update=update)
                    if self.processes.is_main_process:
                        save_state(self.state, progress, self.step.parameters, self.step.optimizer)
                    self._saved = done
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
        recipe, progress, count = self.run.recipe, self.progress, len(self._values)
        losses, norms = torch.stack(self._values, 1)
        values = torch.stack([losses.mean(), norms.max()])
        loss, norm = reduce(values, "mean").tolist()
        seconds = time.monotonic() - self._began
        self._values = []
        self._require_sane(loss, norm)
        progress.lowest_loss = min(loss, progress.lowest_loss or math.inf)
        if self._log is not None:
            step, speed = progress.step, count * recipe.batch.tokens / seconds
            mfu = utilization(
                self.model, recipe.model.context, speed / self.processes.num_processes,
                progress.sessions[-1].environment.hardware,
            )  # fmt: skip
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
        elif lowest is not None and loss > lowest + self.run.recipe.watch.diverged:
            wrong = f"the loss is {loss:.3f}, after {lowest:.3f}: training diverged"
        else:
            return
        kept = "there is no earlier state yet"
        if self._saved is not None:
            kept = f"the state of step {self._saved} is kept in {self.state.parent}"
        raise TrainingError(
            f"step {step}: {wrong}; lower the learning rate or warm up longer ({kept})"
        )

    def _evaluate(self) -> None:
        """Look at the model on the held-out texts, and keep it where it is the best so far."""
        progress, dtype = self.progress, getattr(torch, self.run.recipe.compute.precision)
        if self._log is not None:
            try:
                with deterministic(False):  # medians have no deterministic kernel
                    sample = evaluate(
                        self.model, self.watched, progress.step, self.tokenizer, dtype
                    )
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
                self.run.save(self.model, self.run.folder / BEST)
        self.processes.wait_for_everyone()
        self._began = time.monotonic()


def evaluate(
    model: LlamaForCausalLM,
    ids: Tensor,
    step: int,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
) -> TrainingSample:
    """On texts ``ids`` [N, T] int64, at a copy in ``dtype``, that the checkpoint will be read in:
    what is seen is what ``qbench analyze`` would see. A model that gives no numbers raises
    EvaluationError."""
    found = measure(
        copy.deepcopy(model).to(dtype).eval().requires_grad_(False),
        ids,
        tokenizer=tokenizer,
        linears=(),
        batch=max(1, BATCH_TOKENS // ids.shape[1]),
    )
    first = found.sinks[0]
    return TrainingSample(
        step=step,
        loss=math.log(found.perplexity),
        sink_rate=first.rates[SINK],
        sink_rate_gu=first.rates_gu[SINK],
        kurtosis=found.hidden.kurtosis,
        largest=max(abs(found.hidden.minimum), abs(found.hidden.maximum)),
    )


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Within the body torch's operators, and the kernels that its compiler chooses, give the same
    bits every time, or raise where they cannot; not so where that is not ``wanted``."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    torch.utils.deterministic.fill_uninitialized_memory = False  # none is read
    try:
        # The compiler measures kernels against each other; the fastest may sum in another order.
        with config.patch(deterministic=wanted):
            yield
    finally:
        torch.use_deterministic_algorithms(before)
