"""Whether a recipe and token files go together, and what is read of the files. Imports no torch."""

from __future__ import annotations

from qbench.errors import RecipeError
from qbench.training.held_out import watched_rows
from qbench.training.order import Sequences
from qbench.training.recipe import TrainingRecipe
from qbench.training.token_files import TokenFiles
from qbench.training.tokenizer import TOKENIZER


def sequences(recipe: TrainingRecipe, files: TokenFiles) -> Sequences:
    return Sequences(
        tokens=files.train,
        context=recipe.model.context,
        bos=first_token(recipe, files),
    )


def first_token(recipe: TrainingRecipe, files: TokenFiles) -> int | None:
    """The token that begins every sequence, where the recipe asks for one."""
    return files.about.bos if recipe.data.bos_first else None


def require_data(recipe: TrainingRecipe, files: TokenFiles, *, processes: int, device: str) -> None:
    """Raises RecipeError where the recipe, the data and the processes do not go together,
    DataError where there are too few held-out texts to watch."""
    about = files.about
    if about.vocabulary > recipe.model.vocabulary:
        raise RecipeError(
            f"model.vocabulary {recipe.model.vocabulary}: the tokenizer of {files.folder} has "
            f"{about.vocabulary} ids"
        )
    if recipe.data.bos_first and about.bos is None:
        raise RecipeError(f"data.bos_first: the tokenizer of {files.folder} has no BOS token")
    if recipe.data.bos_first and not (files.folder / TOKENIZER).is_file():
        raise RecipeError(
            f"data.bos_first: {files.folder} has no {TOKENIZER}, in which the trained checkpoint "
            "would say that BOS is first"
        )
    at_once = recipe.batch.sequences * processes
    if recipe.rows % at_once:
        raise RecipeError(
            f"batch.sequences {recipe.batch.sequences} × {processes} processes must divide "
            f"the {recipe.rows} sequences of a step; lower it, here or with --sequences"
        )
    on_cpus = processes > 1 and device == "cpu"
    if on_cpus and recipe.compute.travel == "bfloat16":
        raise RecipeError("compute.travel: processes on a CPU average gradients in float32 alone")
    if len(sequences(recipe, files)) < recipe.rows:
        raise RecipeError(
            f"{files.folder}: {len(files.train):,} tokens are fewer than one step takes "
            f"({recipe.batch.tokens:,}); tokenize more text"
        )
    watched_rows(recipe, files)
