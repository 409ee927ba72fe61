"""Content that carries its own checksum, so that a changed byte is noticed. No torch.

JSON objects keep it under ``checksum``: SHA-256 of the canonical JSON of all else. Other files
(Parquet, safetensors) keep it in their metadata, in the place of ``BLANK``: SHA-256 of the whole
file with ``BLANK`` there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qbench.errors import DamagedError, NewerSchemaError, ResultsError, SchemaError
from qbench.files import digest

CHECKSUM = "checksum"
MARK = b"qbench-sha256:"
BLANK = MARK + b"0" * 64
AGAIN = "run the recipe again"


def canonical(values: dict[str, Any]) -> bytes:
    """One spelling of a JSON object: keys sorted, no spaces, ASCII."""
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def seal(values: dict[str, Any]) -> bytes:
    """JSON text of ``values`` with their checksum."""
    checksum = digest(canonical(values))
    return (json.dumps({**values, CHECKSUM: checksum}, indent=1, ensure_ascii=False) + "\n").encode(
        errors="surrogatepass"
    )


def unseal(path: Path, payload: bytes, *, schema: int, again: str = AGAIN) -> dict[str, Any]:
    """What ``seal`` was given, from the content ``payload`` of ``path``.

    Raises SchemaError for another ``schema_version`` than ``schema``, DamagedError for any change
    of content; ``again`` is the remedy that both name.
    """
    try:
        values = json.loads(payload)
    except (ValueError, RecursionError):
        raise DamagedError(f"{path}: damaged: not whole JSON; {again}") from None
    if not isinstance(values, dict):
        raise DamagedError(f"{path}: damaged: not a JSON object; {again}")
    check_schema(path, values.get("schema_version"), schema, again)
    stated = values.pop(CHECKSUM, None)
    if stated is None:
        raise DamagedError(f"{path}: damaged: it has no checksum; {again}")
    if stated != digest(canonical(values)):
        raise DamagedError(f"{path}: damaged: its content is not what was written; {again}")
    return values


def check_schema(path: Path, found: object, schema: int, again: str = AGAIN) -> None:
    """Raise SchemaError where the version ``found`` in ``path`` is not ``schema``."""
    if type(found) is not int:
        raise DamagedError(f"{path}: damaged: it has no schema_version; {again}")
    if found > schema:
        raise NewerSchemaError(
            f"{path}: written by a newer qbench (schema {found}, this one reads {schema}): "
            "update qbench"
        )
    if found < schema:
        kept = "; the old record stays untouched" if again == AGAIN else ""
        raise SchemaError(
            f"{path}: written by an older qbench (schema {found}, this one reads {schema}): "
            f"{again}{kept}"
        )


def seal_file(payload: bytes) -> bytes:
    """``payload``, which has ``BLANK`` once, with its checksum there: of the same length."""
    assert payload.count(MARK) == 1, "BLANK belongs into the metadata, once"
    assert payload.count(BLANK) == 1
    return payload.replace(BLANK, MARK + digest(payload).encode())


def check_file(path: Path, payload: bytes, *, again: str = AGAIN) -> None:
    """Raise ResultsError where ``payload``, the content of ``path``, has no checksum, DamagedError
    where it has changed since ``seal_file``. Look before a library parses it."""
    start = payload.find(MARK)
    if start < 0:
        raise ResultsError(f"{path}: has no checksum of qbench's; {again}")
    end = start + len(BLANK)
    blanked = b"".join((payload[:start], BLANK, payload[end:]))
    if payload[start:end] != MARK + digest(blanked).encode():
        raise DamagedError(f"{path}: damaged: its content is not what was written; {again}")
