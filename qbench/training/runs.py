"""Train all runs of a recipe, every seed with every attention function, and write their records."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path

import torch
from accelerate import PartialState
from filelock import FileLock, Timeout

from qbench.checkpoints import Checkpoint
from qbench.checkpoints.find import Shapes
from qbench.checkpoints.load import without_weights
from qbench.errors import TrainingError, UnavailableError
from qbench.files import clean_temporaries
from qbench.quantizers.linear import matrices
from qbench.records import TRAINING_FILE, TrainedOn, Training, TrainingSample, write_record
from qbench.training.checkpoint import Run
from qbench.training.data import TokenFiles, require_data
from qbench.training.loop import Trainer
from qbench.training.model import checkpoint_config, deterministic
from qbench.training.training_recipe import TrainingRecipe


@contextmanager
def joined(device: str) -> Iterator[PartialState]:
    """Join the processes that torchrun or accelerate started, by their environment variables; one
    process without them.

    Call it before anything is computed on a GPU: without a fixed workspace cuBLAS may sum in
    another order from one process to the next. Raises UnavailableError for a GPU that does not
    exist.
    """
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
    wandb: bool = False,
    stop_after: int | None = None,
) -> list[Training]:
    """Train the runs that are not finished, or ``stop_after`` steps of each. Each run's checkpoint
    goes to ``out/<normalizer>-seed<n>``.

    Returns the records of the finished runs. Raises TrainingError if one breaks.
    """
    require_data(recipe, files, processes=processes.num_processes, device=processes.device.type)
    records = []
    for normalizer, seed in recipe.runs():
        name = run_name(normalizer, seed)
        run = Run(
            recipe=recipe, files=files, normalizer=normalizer, seed=seed, folder=out / name
        )  # fmt: skip
        record = run.finished()
        if record is not None:
            log(f"{name}: trained already")
        else:
            alone = _alone(run.folder) if processes.is_main_process else nullcontext()
            with alone, deterministic(recipe.compute.deterministic):
                trainer = Trainer(
                    run, processes=processes, log=lambda line, name=name: log(f"{name}: {line}")
                )
                trainer.train(wandb=wandb, stop_after=stop_after)
                if trainer.progress.step == recipe.steps:
                    record = _record(trainer)
        if record is not None:
            records.append(record)
    return records


def untrained(recipe: TrainingRecipe, files: TokenFiles) -> dict[str, tuple[Checkpoint, Shapes]]:
    """Return, by attention function, the checkpoint that will be trained and the shapes of its
    linear layers, as a plan needs them."""
    by_normalizer = {}
    for normalizer in recipe.normalizers:
        checkpoint = Checkpoint(
            source=normalizer, folder=files.folder, normalizer=normalizer, digest="", files=(),
            config=checkpoint_config(recipe.model, normalizer, **files.about.special),
        )  # fmt: skip
        layers = matrices(without_weights(checkpoint)).values()
        shapes: Shapes = {
            layer.name: (layer.weight.shape[0], layer.weight.shape[1]) for layer in layers
        }
        by_normalizer[normalizer] = checkpoint, shapes
    return by_normalizer


def run_name(normalizer: str, seed: int | str) -> str:
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
def _alone(folder: Path) -> Iterator[None]:
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
