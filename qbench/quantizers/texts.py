"""Calibration text as files: where it lies, what is in it, a digest of its bytes. No torch."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from qbench import hub
from qbench.errors import DataError, RecipeError

LONGEST_LINE = 64 * 2**20  # bytes, unpacked
HUB_FILE = "hf://"  # prefix of a file in a hub dataset: hf://datasets/<owner>/<name>/<file>


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationText:
    """``samples`` documents of ``length`` tokens, drawn by ``seed`` from a file with ``digest``;
    ``bos``: BOS is the first token of each, as of every text that is scored."""

    path: Path
    digest: str  # SHA-256 of the file's bytes
    samples: int
    length: int
    seed: int
    bos: bool = False


def find_text(address: str, *, base: Path, data: Path | None) -> Path:
    """The local file of a calibration ``path``: relative to ``base``, or of the hub.

    With a ``data`` folder the hub is not asked: the one file in the folder ``calibration`` in or
    beside it stands for the hub's. Raises RecipeError and DataError.
    """
    if not address.startswith(HUB_FILE):
        return (base / address).resolve()
    return _download(address) if data is None else _beside(data)


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_texts(path: Path, *, most: int | None = None, digest: str | None = None) -> list[str]:
    """The ``text`` of each line, of the first ``most`` lines.

    ``digest`` is what the bytes that are parsed must have. Raises DataError with the location.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file; calibration needs JSON Lines with a text field")
    if digest is None:
        with path.open("rb") as file:
            return _parsed(file, path, most)
    payload = path.read_bytes()
    if hashlib.sha256(payload).hexdigest() != digest:
        raise DataError(
            f"{path}: the calibration text changed after this run began; run again, so that what "
            "is quantized with it stands under its key"
        )
    return _parsed(io.BytesIO(payload), path, most)


def _parsed(file: BinaryIO, path: Path, most: int | None) -> list[str]:
    texts = []
    lines = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
    try:
        # never more than one line's limit at once: gzip packs gigabytes into a few megabytes
        read = iter(lambda: lines.readline(LONGEST_LINE + 1), b"")
        for number, line in enumerate(islice(read, most), start=1):
            if len(line) > LONGEST_LINE:
                raise DataError(
                    f"{path}: line {number}: longer than {LONGEST_LINE // 2**20} MiB; one JSON "
                    "object a line is needed"
                )
            if line.strip():
                texts.append(_text(line, path, number))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: not a whole gzip file ({error}); fetch it again") from None
    return texts


def _text(line: bytes, path: Path, number: int) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, TypeError, KeyError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise DataError(f"{path}: line {number}: not a JSON object with a text field")
    return text


def _beside(data: Path) -> Path:
    for folder in (data / "calibration", data.parent / "calibration"):
        files = sorted(folder.glob("*.jsonl"))
        if len(files) == 1:
            return files[0]
        if files:
            names = ", ".join(file.name for file in files)
            raise DataError(f"{folder}: which is the calibration text? say --calibration ({names})")
    raise DataError(
        f"calibration: no *.jsonl in {data}/calibration or {data.parent}/calibration, and with a "
        "data folder the hub is not asked; say --calibration FILE"
    )


def _download(address: str) -> Path:
    """The local copy of ``hf://datasets/<owner>/<name>[@<revision>]/<file>``."""
    parts = address.removeprefix(HUB_FILE).split("/", 3)
    if len(parts) != 4 or parts[0] != "datasets" or not all(parts):
        raise RecipeError(
            f"calibration.path: {address}: write {HUB_FILE}datasets/OWNER/NAME/FILE, or "
            "NAME@REVISION"
        )
    _, owner, name, file = parts
    name, _, revision = name.partition("@")
    try:
        return hub.dataset_file(f"{owner}/{name}", file, revision or None)
    except DataError as error:
        raise DataError(
            f"calibration.path: {address}: {error}; "
            "or name a local JSON Lines file with --calibration FILE"
        ) from error
