"""All runs of a recipe, every seed with every normalizer, one after the other; their records."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState
from filelock import FileLock, Timeout
from pydantic import ValidationError
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from qbench.errors import TrainingError, UnavailableError
from qbench.files import clean_temporaries, file_digest, write_atomically
from qbench.records import (
    TRAINING_FILE,
    TrainedOn,
    Training,
    TrainingSample,
    TrainingSession,
    canonical,
)
from qbench.training import checkpoint
from qbench.training.checkpoint import require_same
from qbench.training.data import TokenFiles, first_token, require_data, sequences, watched_rows
from qbench.training.evaluate import evaluate
from qbench.training.log import FILE as LOG
from qbench.training.log import Log, open_trackers, plot, read_log
from qbench.training.loop import Trainer, deterministic
from qbench.training.model import DTYPES, checkpoint_config, initial_model
from qbench.training.recipe import TrainingRecipe

STATE, BEST, CURVES = "state", "best", "curves.svg"


@contextmanager
def joined(device: str) -> Iterator[PartialState]:
    """What torchrun's or accelerate's environment variables say; alone without them. Comes before
    anything is computed on a GPU: without cuBLAS's workspace, where the user set none, it may sum
    in another order from one process to the next.

    Raises UnavailableError for a GPU that is not there.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda" and local >= torch.cuda.device_count():
        raise UnavailableError(
            f"process {local} of this host has no GPU of its own: {torch.cuda.device_count()} "
            "are visible; start torchrun with at most that --nproc-per-node"
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
    say: Callable[[str], None],
    trackers: Sequence[str] = (),
    stop_after: int | None = None,
) -> list[Training]:
    """Train what is not trained yet, or ``stop_after`` steps of each run; each run's checkpoint
    goes to ``out/<normalizer>-seed<n>``.

    Returns the records of finished runs. Raises TrainingError where one breaks.
    """
    require_data(recipe, files, processes=processes.num_processes, device=processes.device.type)
    found = []
    for normalizer, seed in recipe.runs():
        name = run_name(normalizer, seed)
        folder = out / name
        settings = settings_digest(recipe, files, normalizer, seed)
        record = finished(folder, settings)
        if record is not None:
            say(f"{name}: trained already")
        else:
            with _alone(folder, processes), deterministic(recipe.compute.deterministic):
                record = _trained(
                    recipe, files, folder, normalizer, seed, processes=processes,
                    settings=settings, say=lambda line, name=name: say(f"{name}: {line}"),
                    trackers=trackers, stop_after=stop_after,
                )  # fmt: skip
        if record is not None:
            found.append(record)
    return found


def run_name(normalizer: str, seed: int | str) -> str:
    return f"{normalizer}-seed{seed}"


def settings_digest(recipe: TrainingRecipe, files: TokenFiles, normalizer: str, seed: int) -> str:
    """Of all that shapes a run: a state goes on only under the same."""
    parts = {
        "settings": recipe.settings(),
        "data": files.about.digest,
        "normalizer": normalizer,
        "seed": seed,
    }
    return hashlib.sha256(canonical(parts)).hexdigest()


def finished(folder: Path, settings: str) -> Training | None:
    """The record of what is trained in ``folder`` already. Raises TrainingError for other settings,
    and for a record or weights that are not what training wrote."""
    path = folder / TRAINING_FILE
    if not path.is_file():
        return None
    again = f"remove {path}, and the same command writes it again from the last state"
    try:
        known = Training.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = error.errors()[0]
        location = ".".join(map(str, problem["loc"])) or "all"
        raise TrainingError(f"{path}: damaged: {location}: {problem['msg']}; {again}") from None
    require_same(known.settings_digest, settings, folder)
    for name, written in known.weights.items():
        if not (folder / name).is_file() or file_digest(folder / name) != written:
            raise TrainingError(f"{folder / name}: not the weights that were written; {again}")
    return known


def draw(out: Path) -> Path | None:
    """The curves of all runs that have begun in ``out``; None where none has."""
    logs = {}
    for path in sorted(out.glob(f"{run_name('*', '*')}/{STATE}/{LOG}")):
        normalizer, _, seed = path.parent.parent.name.rpartition("-seed")
        if seed.isdecimal() and (lines := read_log(path)):
            logs[normalizer, int(seed)] = lines
    if not logs:
        return None
    plot(logs, out / CURVES)
    return out / CURVES


def _trained(
    recipe: TrainingRecipe,
    files: TokenFiles,
    folder: Path,
    normalizer: str,
    seed: int,
    *,
    processes: PartialState,
    settings: str,
    say: Callable[[str], None],
    trackers: Sequence[str],
    stop_after: int | None,
) -> Training | None:
    """The record; None where steps are left."""
    about, name, state = files.about, run_name(normalizer, seed), folder / STATE
    ids = {"bos": about.bos, "eos": about.eos, "pad": about.pad}
    config = checkpoint_config(recipe.model, normalizer, **ids)

    def save(model: LlamaForCausalLM, target: Path) -> dict[str, str]:
        return checkpoint.save_checkpoint(
            model, target, config=config, tokenizer=files.folder, first=first_token(recipe, files)
        )  # fmt: skip

    model, attention = initial_model(
        recipe.model, normalizer=normalizer, seed=seed, device=processes.device,
        attention=recipe.compute.attention, tokens=ids,
    )  # fmt: skip
    say(f"{model.num_parameters():,} parameters, {attention}")
    trainer = Trainer(
        recipe, model, folder=state, processes=processes, settings=settings,
        evaluate=partial(
            evaluate,
            ids=torch.tensor(watched_rows(recipe, files)),
            tokenizer=PreTrainedTokenizerFast.from_pretrained(files.folder),
            dtype=DTYPES[recipe.compute.precision],
        ),
        best=lambda one: save(one, folder / BEST),
        say=say,
    )  # fmt: skip
    progress = trainer.train(
        sequences(recipe, files),
        seed=seed,
        log=lambda step: Log(
            state / LOG, step=step,
            trackers=open_trackers(trackers, folder, name, recipe.settings()),
        ),
        stop_after=stop_after,
    )  # fmt: skip
    if progress.step < recipe.steps:
        return None
    lines = read_log(state / LOG) if (state / LOG).is_file() else []
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    record = Training(
        name=recipe.name,
        normalizer=normalizer,
        seed=seed,
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
        attention=attention,
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
            for line in lines
            if line["kind"] == "watch"
        ),
        sessions=tuple(TrainingSession(**one) for one in progress.sessions),
        finished=datetime.now(UTC),
    )
    if processes.is_main_process:
        record = record.model_copy(update={"weights": save(model, folder)})
        text = record.model_dump_json(indent=1) + "\n"
        write_atomically(folder / TRAINING_FILE, text.encode())
    processes.wait_for_everyone()
    return record


@contextmanager
def _alone(folder: Path, processes: PartialState) -> Iterator[None]:
    """No other training works in ``folder`` meanwhile."""
    if not processes.is_main_process:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise TrainingError(f"{folder}: another process trains there") from None
    try:
        clean_temporaries(folder)
        yield
    finally:
        lock.release()
