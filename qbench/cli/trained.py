"""What ``qbench train`` does once runs are trained: a line on each, curves, ``--evaluate``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from qbench.cli.options import Device, show_written
from qbench.errors import RecipeError

if TYPE_CHECKING:
    from qbench.records import Training
    from qbench.training.recipe import TrainingRecipe


def show_trained(recipe: TrainingRecipe, found: Sequence[Training], folder: Path) -> None:
    """A line on each run that is ``found`` finished, and the curves of all that have begun."""
    from qbench.training.runs import draw

    for record in found:
        line = (
            f"{record.normalizer}, seed {record.seed}: loss {record.final_loss or 0:.4f} after "
            f"{record.tokens:,} tokens"
        )
        if record.watched and record.best_loss is not None:
            line += (
                f"; held out {record.watched[-1].loss:.4f} "
                f"(best {record.best_loss:.4f} at step {record.best_step:,})"
            )
        typer.echo(line)
    if len(found) < len(runs := recipe.runs()):
        typer.echo(f"{len(found)} of {len(runs)} runs are done; the same command goes on")
    curves = draw(recipe, folder)
    show_written([folder, *([curves] if curves else [])])


def evaluation(
    recipe: Path | None,
    data: Path | None,
    cluster: str | None,
    loaded: TrainingRecipe,
    folder: Path,
    *,
    weights: bool,
    gpus: str | None,
) -> Callable[[Device], None] | None:
    """What runs the recipe of ``--evaluate`` on the checkpoints in ``folder``, on ``gpus`` unless
    ``cluster`` runs it; None without one. Raises RecipeError, before anything is trained, where it
    could not."""
    from qbench.cli.run import run
    from qbench.recipe import Overrides, Recipe

    if recipe is None:
        for option, value in (
            ("--evaluate-data", data), ("--cluster", cluster), ("--gpus", gpus)
        ):  # fmt: skip
            if value is not None:
                raise RecipeError(f"{option} {value}: is of --evaluate RECIPE, which is not given")
        return None
    if not weights:
        raise RecipeError("--evaluate: needs the checkpoints that --no-weights leaves out")
    trained = dict.fromkeys(normalizer for normalizer, _ in loaded.runs())
    places = dict.fromkeys(trained, str(recipe.parent))  # of checkpoints that are not there yet
    asked = Recipe.load(recipe, Overrides(checkpoints=places, data=data)).checkpoints
    if others := [name for name in asked if name not in trained]:
        raise RecipeError(
            f"--evaluate {recipe}: checkpoints.{others[0]}: is none of what is trained here "
            f"({', '.join(trained)}); leave it out of the recipe"
        )

    asked_for = {f"{normalizer}-seed{seed}" for normalizer, seed in loaded.runs()}
    there = {path.name for name in trained for path in folder.glob(f"{name}-seed*")}
    if more := sorted(there - asked_for):
        raise RecipeError(
            f"--evaluate {recipe}: {folder} holds {more[0]} too, a seed that is not asked for; "
            "ask for it as well, or take another --out"
        )

    def evaluate(device: Device) -> None:
        checkpoints = []
        for name in trained:
            seeds = sorted(folder.glob(f"{name}-seed*"))
            checkpoints.append(
                f"{name}={folder}/{name}-seed*" if len(seeds) > 1 else f"{name}={seeds[0]}"
            )
        out, here = folder / "evaluation", gpus if cluster is None else None
        run(recipe, checkpoints, data=data, out=out, device=device, cluster=cluster, gpus=here)

    return evaluate
