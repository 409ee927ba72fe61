"""Documents to train on, one after the other, from local files or the hub. Imports no torch."""

from __future__ import annotations

import gzip
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from qbench.errors import DataError, RecipeError

HUB = "hf://datasets/"  # hf://datasets/OWNER/NAME[@REVISION][:CONFIGURATION]
HUB_SOURCE = re.compile(r"([\w.-]+/[\w.-]+?)(?:@([\w.-]+))?(?::([\w.-]+))?")
CHUNK = 1 << 20  # characters of a text read at once
LONGEST = 1 << 28  # characters of one document
OPENERS = {".gz": gzip.open, ".xz": lzma.open}
KINDS = (".jsonl", ".txt", ".parquet")


def documents(source: str, *, field: str = "text", split: str = "train") -> Iterator[str]:
    """The documents of ``source``, in its order; empty ones are left out.

    ``*.jsonl``: the ``field`` of each line; ``*.txt``: separated by a zero byte, or one document;
    both may end in ``.gz`` or ``.xz``. ``*.parquet``: the column ``field``.
    ``hf://datasets/OWNER/NAME``, with ``@REVISION`` and ``:CONFIGURATION`` where wanted: that
    ``split`` of a dataset on the hub, streamed. Raises DataError with the place of what is wrong.
    """
    if source.startswith(HUB):
        found = _hub(source, field, split)
    elif kind(Path(source)) == ".parquet":
        found = _parquet(Path(source), field)
    elif kind(Path(source)) == ".jsonl":
        found = _json_lines(Path(source), field)
    else:
        found = _separated(Path(source))
    return (text for text in found if text.strip())


def require_source(source: str) -> None:
    """Raises DataError or RecipeError for a source that cannot be read, before work begins."""
    if source.startswith(HUB):
        if not HUB_SOURCE.fullmatch(source.removeprefix(HUB)):
            raise RecipeError(f"{source}: write {HUB}OWNER/NAME[@REVISION][:CONFIGURATION]")
        return
    path = Path(source)
    if not path.is_file():
        raise DataError(f"{source}: no such file; name text files, or {HUB}OWNER/NAME")
    if kind(path) not in KINDS:
        raise DataError(
            f"{source}: text comes as {', '.join(KINDS)} (the first two also .gz or .xz)"
        )


def kind(path: Path) -> str:
    """The ending that says what a file holds: ``.txt`` of ``books.txt.xz``."""
    return path.with_suffix("").suffix if path.suffix in OPENERS else path.suffix


def _open(path: Path) -> IO[str]:
    opener = OPENERS.get(path.suffix, open)
    return opener(path, "rt", encoding="utf-8", newline="")


def _separated(path: Path) -> Iterator[str]:
    held: list[str] = []
    size = 0
    try:
        with _open(path) as file:
            while chunk := file.read(CHUNK):
                *ended, rest = chunk.split("\0")
                for part in ended:
                    yield "".join([*held, part])
                    held, size = [], 0
                held.append(rest)
                size += len(rest)
                if size > LONGEST:
                    raise DataError(
                        f"{path}: a document of more than {LONGEST:,} characters; separate "
                        "documents by a zero byte"
                    )
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise DataError(f"{path}: cannot be read as text ({error})") from None
    yield "".join(held)


def _json_lines(path: Path, field: str) -> Iterator[str]:
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _field(line, field, f"{path}:{number}")
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise DataError(f"{path}: cannot be read as text ({error})") from None


def _field(line: str, field: str, location: str) -> str:
    try:
        row = json.loads(line)
        text = row.get(field)
    except (ValueError, AttributeError, RecursionError):
        raise DataError(f"{location}: not a JSON object") from None
    if not isinstance(text, str):
        known = ", ".join(name for name, value in row.items() if isinstance(value, str))
        raise DataError(
            f"{location}: no text in field {field!r}; say --field with one of: {known or 'none'}"
        )
    return text


def _parquet(path: Path, field: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        if field not in file.schema_arrow.names:
            known = ", ".join(file.schema_arrow.names)
            raise DataError(f"{path}: no column {field!r}; say --field with one of: {known}")
        for batch in file.iter_batches(batch_size=1024, columns=[field]):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file ({str(error).splitlines()[0]})") from None


def _hub(source: str, field: str, split: str) -> Iterator[str]:
    from datasets import load_dataset

    found = HUB_SOURCE.fullmatch(source.removeprefix(HUB))
    assert found is not None, source  # require_source
    name, revision, configuration = found.groups()
    try:
        rows = load_dataset(name, configuration, split=split, revision=revision, streaming=True)
        for row in rows:
            if not isinstance(row.get(field), str):
                raise DataError(f"{source}: no text in field {field!r}; it has {', '.join(row)}")
            yield row[field]
    except DataError:
        raise
    except Exception as error:  # whatever the network and the library make of each other
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{source}: {line}") from error
