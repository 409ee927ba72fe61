"""Content that carries its own checksum, so that a changed byte is noticed. No torch.

JSON objects keep it under ``checksum``: SHA-256 of the canonical JSON of all else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qbench.errors import DamagedError, NewerSchemaError, SchemaError
from qbench.files import digest

CHECKSUM = "checksum"
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
