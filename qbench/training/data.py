"""Read token files, cut sequences from them, and choose the sequences of each step.

Imports no torch before a batch is made.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import AliasChoices, Field, ValidationError

from qbench.checkpoints.find import READ
from qbench.errors import DataError, RecipeError, validation_line
from qbench.files import file_digest
from qbench.records import Digest, Line, RecordModel
from qbench.training.training_recipe import TrainingRecipe

if TYPE_CHECKING:
    from accelerate import PartialState
    from torch import Tensor

ABOUT = "tokens.json"
TOKENIZER = "tokenizer.json"
PARTS = ("train", "held_out")
Part = Literal["train", "held_out"]
NOT_TOKENIZER = ("config.json", "generation_config.json", "*.index.json")


class TokenArray(RecordModel):
    """The size and the checksum of one array of token ids."""

    tokens: Annotated[int, Field(ge=0)]
    documents: Annotated[int, Field(ge=0)]
    sha256: Digest


class TextSource(RecordModel):
    """A source of documents. ``sha256`` is None if it was streamed from the hub."""

    name: Line
    documents: int
    sha256: Digest | None


class AboutTokens(RecordModel, populate_by_name=True):
    """The content of ``tokens.json``. ``vocabulary``: one more than the largest id of the
    tokenizer."""

    schema_version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    vocabulary: int
    bos: int | None  # ids; None: the tokenizer has none
    eos: int | None
    pad: int | None
    bos_of_documents: bool
    eos_of_documents: bool
    # hub id, name of a local folder, or how it was learnt
    tokenizer: Line
    tokenizer_digest: Digest
    sources: tuple[TextSource, ...]
    licences: Line = ""  # earlier versions asked for them
    # that shared a 13-gram with an evaluation text
    left_out_lines: int = Field(
        0, validation_alias=AliasChoices("left_out_lines", "left_out_paragraphs")
    )
    train: TokenArray
    held_out: TokenArray

    @property
    def special(self) -> dict[str, int | None]:
        """The ids of bos, eos and pad, by name."""
        return {"bos": self.bos, "eos": self.eos, "pad": self.pad}

    @property
    def digest(self) -> str:
        """The SHA-256 over the ids of both parts and the tokenizer's files."""
        text = f"{self.dtype} {self.train.sha256} {self.held_out.sha256} {self.tokenizer_digest}"
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenFiles:
    """A folder of token files, mapped into memory: they are read only where they are used."""

    folder: Path
    about: AboutTokens
    train: NDArray[np.unsignedinteger]
    held_out: NDArray[np.unsignedinteger]


def read_token_files(folder: Path) -> TokenFiles:
    """Return the token files in ``folder``. All bytes are hashed, about a gigabyte per second.

    Raises DataError if the folder holds none, or if a file is not what was written.
    """
    path = folder / ABOUT
    if not path.is_file():
        raise DataError(
            f"{folder}: no token files there; make them with: qbench tokenize TEXT --tokenizer "
            f"FOLDER_OR_HUB_ID --out {folder}"
        )
    try:
        about = AboutTokens.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise DataError(f"{path}: {validation_line(error)}; tokenize again") from None
    if not (folder / TOKENIZER).is_file():
        raise DataError(f"{folder}: it has no {TOKENIZER}; tokenize again")
    arrays = {part: _mapped(folder, about, part) for part in PARTS}
    if tokenizer_digest(folder) != about.tokenizer_digest:
        raise DataError(f"{folder}: its tokenizer is not the one it was made with; tokenize again")
    return TokenFiles(folder=folder, about=about, **arrays)


def _mapped(folder: Path, about: AboutTokens, part: Part) -> NDArray:
    path, dtype = folder / f"{part}.bin", np.dtype(about.dtype).newbyteorder("<")
    if not path.is_file() or file_digest(path) != getattr(about, part).sha256:
        raise DataError(f"{path}: its content is not what was written; tokenize again")
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of ``folder`` that a tokenizer is read from. Raises DataError if there are
    none."""
    files = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.name != ABOUT
        and any(fnmatchcase(path.name, pattern) for pattern in READ)
        and not any(fnmatchcase(path.name, pattern) for pattern in NOT_TOKENIZER)
    ]
    if not files:
        raise DataError(f"{folder}: no tokenizer there (no tokenizer.json)")
    return files


def tokenizer_digest(folder: Path) -> str:
    """Return the SHA-256 over the names and contents of the tokenizer's files."""
    total = hashlib.sha256()
    for path in tokenizer_files(folder):
        total.update(f"{path.name} {file_digest(path)}\n".encode())
    return total.hexdigest()


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files from the folder ``source`` to the folder ``target``."""
    for path in tokenizer_files(source):
        shutil.copyfile(path, target / path.name)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sequences:
    """Token ids cut into rows of ``context`` + 1 ids: every token but the first is predicted.

    Rows follow one another without a gap. Without ``bos`` the last token of a row is the first of
    the next; with it each row begins with that id instead.
    """

    tokens: NDArray[np.unsignedinteger]
    context: int
    bos: int | None

    def __len__(self) -> int:
        usable = len(self.tokens) - (self.bos is None)
        return max(0, usable // self.context)

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows ``indices``, int64 [len(indices), context + 1]."""
        length = self.context + (self.bos is None)
        starts = np.asarray(indices) * self.context
        rows = sliding_window_view(self.tokens, length)[starts].astype(np.int64)
        return rows if self.bos is None else np.insert(rows, 0, self.bos, axis=1)


def sample_indices(step: int, *, rows: int, of: int, seed: int) -> NDArray[np.int64]:
    """Return the indices [rows] of the sequences of ``step``, counted from 0, out of ``of``
    sequences.

    Each epoch has an order of its own, a permutation by NumPy's PCG64 seeded with (seed, epoch), so
    that any step can be computed without the steps before it.
    """
    positions = np.arange(step * rows, (step + 1) * rows)
    epochs = positions // of
    indices = np.empty(rows, np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        indices[here] = permutation(of, seed, int(epoch))[positions[here] % of]
    return indices


@lru_cache(maxsize=2)  # a step may lie in two epochs
def permutation(of: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(of)


def dataloader(
    source: Sequences, recipe: TrainingRecipe, processes: PartialState, *, first: int, seed: int
) -> Iterator[Tensor]:
    """Yield the batches of this process, int64 [sequences, context + 1] on its device: one per
    forward pass, step by step from ``first``. The sequences of a step are the same for any number
    of processes and passes."""
    import torch

    size = recipe.batch.sequences
    offset, stride = processes.process_index * size, processes.num_processes * size
    for step in range(first, recipe.steps):
        indices = sample_indices(step, rows=recipe.global_batch_size, of=len(source), seed=seed)
        for begin in range(offset, len(indices), stride):
            batch = torch.from_numpy(source.rows(indices[begin : begin + size]))
            if processes.device.type == "cuda":
                batch = batch.pin_memory()
            yield batch.to(processes.device, non_blocking=True)


def watched_rows(recipe: TrainingRecipe, files: TokenFiles) -> list[list[int]]:
    """Return ``watch.samples`` rows of ``watch.length`` ids: the first held-out documents that are
    long enough, each as BOS, if the tokenizer has one, and its first tokens.

    Raises DataError if there are too few.
    """
    bos = files.about.bos
    begin = [] if bos is None else [bos]
    room = recipe.watched_length - len(begin)
    count = recipe.watch.samples
    texts = [text[:room] for text in _documents(files) if len(text) >= room][:count]
    if len(texts) < count:
        raise DataError(
            f"{files.folder}: {len(texts)} held-out documents have {room} tokens or more, and "
            f"watch.samples asks for {count}: lower it or watch.length, or tokenize more text"
        )
    return [[*begin, *text.tolist()] for text in texts]


def _documents(files: TokenFiles) -> list[np.ndarray]:
    """Return the held-out documents without their BOS; all as one if no token separates them."""
    about, ids = files.about, np.asarray(files.held_out).astype(np.int64)
    if about.bos_of_documents:
        return [part[1:] for part in np.split(ids, np.flatnonzero(ids == about.bos)) if len(part)]
    if about.eos_of_documents:
        return np.split(ids, np.flatnonzero(ids == about.eos) + 1)
    return [ids]


def sequences(recipe: TrainingRecipe, files: TokenFiles) -> Sequences:
    """Return the sequences that the training of ``recipe`` reads."""
    return Sequences(
        tokens=files.train,
        context=recipe.model.context,
        bos=first_token(recipe, files),
    )


def first_token(recipe: TrainingRecipe, files: TokenFiles) -> int | None:
    """Return the id that begins every sequence, None unless the recipe asks for one."""
    return files.about.bos if recipe.data.bos_first else None


def require_data(recipe: TrainingRecipe, files: TokenFiles, *, processes: int, device: str) -> None:
    """Raise RecipeError if the recipe, the data and the processes do not fit together, DataError if
    there are too few held-out texts to evaluate."""
    about = files.about
    if about.vocabulary > recipe.model.vocabulary:
        raise RecipeError(
            f"model.vocabulary {recipe.model.vocabulary}: the tokenizer of {files.folder} has "
            f"{about.vocabulary} ids"
        )
    if recipe.data.bos_first and about.bos is None:
        raise RecipeError(f"data.bos_first: the tokenizer of {files.folder} has no BOS token")
    at_once = recipe.batch.sequences * processes
    if recipe.global_batch_size % at_once:
        raise RecipeError(
            f"batch.sequences {recipe.batch.sequences} × {processes} processes must divide "
            f"the {recipe.global_batch_size} sequences of a step; lower it, here or with "
            "--sequences"
        )
    on_cpus = processes > 1 and device == "cpu"
    if on_cpus and recipe.compute.grad_comm_dtype == "bfloat16":
        raise RecipeError(
            "compute.grad_comm_dtype: CPU processes can average gradients in float32 only; set it "
            "to float32"
        )
    if len(sequences(recipe, files)) < recipe.global_batch_size:
        raise RecipeError(
            f"{files.folder}: {len(files.train):,} tokens are fewer than one step takes "
            f"({recipe.batch.tokens:,}); tokenize more text"
        )
    watched_rows(recipe, files)
