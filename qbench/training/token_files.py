"""A folder of token files: two flat arrays of token ids and what they are. Imports no torch.

``tokens.json`` says what the others are, ``train.bin`` and ``held_out.bin`` hold ids as
little-endian integers, one document after the other, each BOS, text, EOS. The tokenizer's own
files lie beside them: a trained checkpoint takes them along.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, ValidationError

from qbench.checkpoints.find import HUB_ID, READ
from qbench.errors import DataError
from qbench.records import Digest, Line, RecordModel

ABOUT = "tokens.json"
PARTS = ("train", "held_out")
Part = Literal["train", "held_out"]
NOT_TOKENIZER = ("config.json", "generation_config.json", "*.index.json")


def _without_place(named: str) -> str:
    """A hub id as it is, a path by its last part, as sources are named."""
    return named if HUB_ID.fullmatch(named) else PurePath(named).name or named


class TokenArray(RecordModel):
    """One of the two arrays."""

    tokens: Annotated[int, Field(ge=0)]
    documents: Annotated[int, Field(ge=0)]
    sha256: Digest


class TextSource(RecordModel):
    """Where documents came from. ``sha256`` None: streamed from the hub."""

    name: Line
    documents: int
    sha256: Digest | None


class AboutTokens(RecordModel):
    """``tokens.json``. ``vocabulary``: how many ids the tokenizer has."""

    schema_version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    vocabulary: int
    bos: int | None  # ids; None: the tokenizer has none
    eos: int | None
    pad: int | None
    bos_of_documents: bool
    eos_of_documents: bool
    # hub id, name of a local folder, or how it was learnt
    tokenizer: Annotated[Line, AfterValidator(_without_place)]
    tokenizer_digest: Digest
    sources: tuple[TextSource, ...]
    licences: Line = ""
    left_out_paragraphs: int = 0  # that shared a 13-gram with an evaluation text
    train: TokenArray
    held_out: TokenArray

    @property
    def digest(self) -> str:
        """SHA-256 over the ids of both parts and the tokenizer's files."""
        text = f"{self.dtype} {self.train.sha256} {self.held_out.sha256} {self.tokenizer_digest}"
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenFiles:
    """A folder of token files, mapped into memory: nothing of them is copied until it is read."""

    folder: Path
    about: AboutTokens
    train: NDArray[np.unsignedinteger]
    held_out: NDArray[np.unsignedinteger]


def read_token_files(folder: Path, *, verify: bool = True) -> TokenFiles:
    """Raises DataError where the folder is none of token files or its bytes are not those that
    were written (``verify``: all of them are read, a gigabyte a second)."""
    path = folder / ABOUT
    if not path.is_file():
        raise DataError(
            f"{folder}: no token files there; make them with: qbench tokenize TEXT --tokenizer "
            f"FOLDER_OR_HUB_ID --out {folder}"
        )
    try:
        about = AboutTokens.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = error.errors()[0]
        location = ".".join(map(str, problem["loc"]))
        raise DataError(f"{path}: {location}: {problem['msg']}; tokenize again") from None
    arrays = {part: _mapped(folder, about, part, verify) for part in PARTS}
    if verify and tokenizer_digest(folder) != about.tokenizer_digest:
        raise DataError(f"{folder}: its tokenizer is not the one it was made with; tokenize again")
    return TokenFiles(folder=folder, about=about, **arrays)


def _mapped(folder: Path, about: AboutTokens, part: Part, verify: bool) -> NDArray:
    path, stated = folder / f"{part}.bin", getattr(about, part)
    dtype = np.dtype(about.dtype).newbyteorder("<")
    size = path.stat().st_size if path.is_file() else -1
    if size != stated.tokens * dtype.itemsize:
        raise DataError(f"{path}: {size} bytes, not {stated.tokens} tokens; tokenize again")
    if verify:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != stated.sha256:
                raise DataError(f"{path}: not the bytes that were written; tokenize again")
    return np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of ``folder`` that a tokenizer is read from."""
    found = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.name != ABOUT
        and any(fnmatchcase(path.name, pattern) for pattern in READ)
        and not any(fnmatchcase(path.name, pattern) for pattern in NOT_TOKENIZER)
    ]
    if not found:
        raise DataError(f"{folder}: no tokenizer there (no tokenizer.json)")
    return found


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 over names and contents of the tokenizer's files."""
    total = hashlib.sha256()
    for path in tokenizer_files(folder):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.name} {content}\n".encode())
    return total.hexdigest()


def copy_tokenizer(source: Path, target: Path) -> None:
    for path in tokenizer_files(source):
        shutil.copyfile(path, target / path.name)


def write_about(folder: Path, about: AboutTokens) -> None:
    text = json.dumps(about.model_dump(mode="json"), indent=2) + "\n"
    (folder / ABOUT).write_text(text, encoding="utf-8")
