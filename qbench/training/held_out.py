"""The held-out texts that a training is watched on. Imports no torch."""

from __future__ import annotations

import numpy as np

from qbench.errors import DataError
from qbench.training.recipe import TrainingRecipe
from qbench.training.token_files import TokenFiles


def watched_rows(recipe: TrainingRecipe, files: TokenFiles) -> list[list[int]]:
    """``watch.samples`` rows of ``watch.length`` ids: the first held-out documents that are long
    enough, each BOS, where the tokenizer has one, and its first tokens. Raises DataError where
    there are too few."""
    bos = files.about.bos
    begin = [] if bos is None else [bos]
    room = recipe.watched_length - len(begin)
    wanted = recipe.watch.samples
    texts = [text[:room] for text in _documents(files) if len(text) >= room][:wanted]
    if len(texts) < wanted:
        raise DataError(
            f"{files.folder}: {len(texts)} held-out documents have {room} tokens or more, and "
            f"watch.samples asks for {wanted}: lower it or watch.length, or tokenize with more "
            "--held-out"
        )
    return [[*begin, *text.tolist()] for text in texts]


def _documents(files: TokenFiles) -> list[np.ndarray]:
    """The held-out documents, without their BOS; as one where nothing parts them."""
    about, ids = files.about, np.asarray(files.held_out).astype(np.int64)
    if about.bos_of_documents:
        return [part[1:] for part in np.split(ids, np.flatnonzero(ids == about.bos)) if len(part)]
    if about.eos_of_documents:
        return np.split(ids, np.flatnonzero(ids == about.eos) + 1)
    return [ids]
