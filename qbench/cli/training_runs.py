"""The runs of ``qbench train``: one after the other in this process, or side by side in others."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qbench.errors import TrainingError
from qbench.machine import redirected, terminal
from qbench.training.recipe import TrainingRecipe
from qbench.training.runs import (
    Options,
    finished,
    require_state,
    run_name,
    settings_digest,
    train_recipe,
)
from qbench.training.side_by_side import Broken, Part, train_side_by_side
from qbench.training.token_files import TokenFiles

if TYPE_CHECKING:
    from qbench.records import Training

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the command line asks for, read and checked. ``path`` is the recipe's file."""

    path: Path
    recipe: TrainingRecipe
    files: TokenFiles
    folder: Path
    device: str
    options: Options

    def settings(self, run: tuple[str, int]) -> str:
        return settings_digest(self.recipe, self.files, *run)


def one_by_one(asked: Asked, part: str | None) -> list[Training] | None:
    """The records of finished runs; None where another process is the one that speaks of them:
    torchrun's first, or the parent that asked for one run, the ``part``, by its settings' digest.
    """
    name = "train"
    if part is not None:
        (run,) = asked.recipe.runs()
        name = f"train-{run_name(*run)}"
        if asked.settings(run) != part:
            raise TrainingError(
                f"{asked.path}: it, or its token files, changed after this command began; give it "
                "again"
            )
    from qbench.training.determinism import settle_workspace
    from qbench.training.processes import joined

    settle_workspace()
    with (
        joined(asked.device) as processes,
        terminal() as screen,
        redirected(asked.folder / f"{name}{processes.index or ''}.log"),
    ):
        found = train_recipe(
            asked.recipe,
            asked.files,
            asked.folder,
            processes=processes,
            options=asked.options,
            say=(lambda _, __, line: print(line, file=screen)) if processes.first else _silent,
        )
    return found if processes.first and part is None else None


def _silent(run: str, step: int, line: str) -> None:
    """What the processes beside the first one say."""


def side_by_side(asked: Asked, slots: Sequence[int]) -> tuple[list[Training], list[Broken]]:
    """The records of finished runs, and the runs that broke; ``slots`` holds the GPU of each
    process. Raises QbenchError, before anything is trained, for what none could be trained with."""
    from qbench.training.fit import require_data

    require_data(asked.recipe, asked.files, processes=1, device=asked.device)
    parts, done = [], []
    for run in asked.recipe.runs():
        name, settings = run_name(*run), asked.settings(run)
        if finished(asked.folder / name, settings) is not None:
            done.append(name)
            continue
        require_state(asked.folder / name, settings)
        parts.append(Part(name=name, command=_command(asked, run), settings=settings))
    with terminal() as screen:

        def say(line: str) -> None:
            print(line, file=screen)

        for name in done:
            say(f"{name}: trained already")
        if parts:
            say(_told(parts, slots, asked))
        broken = train_side_by_side(parts, slots, device=asked.device, say=say)
    records = [
        finished(asked.folder / run_name(*run), asked.settings(run)) for run in asked.recipe.runs()
    ]
    return [record for record in records if record is not None], broken


def _told(parts: Sequence[Part], slots: Sequence[int], asked: Asked) -> str:
    gpus = len(set(slots))
    where = f"{gpus} GPU{'s' if gpus > 1 else ''}" if asked.device == "cuda" else "the CPU"
    each = " of each" if asked.device == "cuda" and gpus > 1 else ""
    return (
        f"{len(parts)} run{'s' if len(parts) > 1 else ''} on {where}, at most "
        f"{len(slots) // gpus} side by side{each}; what libraries say goes to "
        f"{asked.folder}/train-RUN.log"
    )


def _command(asked: Asked, run: tuple[str, int]) -> tuple[str, ...]:
    """What trains one ``run`` alone, with all that this command was told."""
    normalizer, seed = run
    recipe, options = asked.recipe, asked.options
    said: dict[str, object] = {
        "--normalizer": normalizer,
        "--seed": seed,
        "--data": recipe.token_folder,
        "--tokens": recipe.tokens,
        "--sequences": recipe.batch.sequences,
        "--out": asked.folder,
        "--device": asked.device,
        "--stop-after": options.stop_after,
        "--largest-file": options.largest_file and options.largest_file // MIB,
    }
    words = [str(word) for pair in said.items() if pair[1] is not None for word in pair]
    words += [word for name in options.trackers for word in ("--tracker", name)]
    words += [] if options.weights else ["--no-weights"]
    return (sys.executable, "-m", "qbench", "train", str(asked.path), *words)
