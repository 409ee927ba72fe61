"""Read and write a record as JSON with its own checksum. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from qbench.errors import DamagedError, NewerSchemaError, SchemaError, validation_line
from qbench.files import content_key, write_atomically
from qbench.records import SCHEMA_VERSION, RecordModel, Training

CHECKSUM = "checksum"
RUN_AGAIN = "run the recipe again"  # the remedy that messages name

T = TypeVar("T", bound=RecordModel)


def read(path: Path, kind: type[T], remedy: str = RUN_AGAIN) -> T:
    """Return the record of type ``kind`` in the file ``path``. Raises as :func:`parse`."""
    return parse(path.read_bytes(), kind, path, remedy)


def parse(payload: bytes, kind: type[T], path: Path | str, remedy: str = RUN_AGAIN) -> T:
    """Return the record of type ``kind`` whose JSON text is ``payload``.

    ``path`` and ``remedy`` begin and end the message of an error. Raises DamagedError if the
    checksum or the fields are wrong, SchemaError if an older qbench wrote it, NewerSchemaError if a
    newer one did.
    """

    def damaged(what: str) -> DamagedError:
        return DamagedError(f"{path}: damaged: {what}; {remedy}")

    try:
        values = json.loads(payload)
    except (ValueError, RecursionError):
        raise damaged("not whole JSON") from None
    if not isinstance(values, dict):
        raise damaged("not a JSON object")
    version = values.get("schema_version")
    if type(version) is not int:
        raise damaged("it has no schema_version")
    writer = f"qbench (schema {version}, this one reads {SCHEMA_VERSION})"
    if version > SCHEMA_VERSION:
        raise NewerSchemaError(f"{path}: written by a newer {writer}: update qbench")
    if version < SCHEMA_VERSION:
        raise SchemaError(f"{path}: written by an older {writer}: {remedy}")
    checksum = values.pop(CHECKSUM, None)
    if checksum is None:
        raise damaged("it has no checksum")
    if checksum != content_key(values):
        raise damaged("its content is not what was written")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise damaged(validation_line(error)) from None


def read_training(path: Path) -> Training:
    """Return the record of a training in the file ``path``.

    The checksum may be missing, as earlier versions wrote none. Raises ValueError if the file is
    no such record, DamagedError if it is one whose content is not what was written.
    """
    values = json.loads(path.read_bytes())
    checksum = values.pop(CHECKSUM, None) if isinstance(values, dict) else None
    if checksum is not None and checksum != content_key(values):
        raise DamagedError(f"{path}: not what training wrote")
    return Training.model_validate(values)


def write(path: Path, record: RecordModel) -> None:
    """Write ``record`` with its checksum to ``path``, in one step."""
    write_atomically(path, with_checksum(json.loads(record.model_dump_json())))


def with_checksum(values: dict[str, Any]) -> bytes:
    """Return the JSON text of ``values``, one key per line, with their checksum as the last key.

    The checksum is the SHA-256 of their canonical JSON.
    """
    values = {**values, CHECKSUM: content_key(values)}
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}"
        for key, value in values.items()
    ]
    return ("{" + ",\n".join(lines) + "}\n").encode(errors="surrogatepass")
