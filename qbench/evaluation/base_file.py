"""The file of what an unquantized cell keeps for its quantized ones: where it is, whether it is
whole. Imports no torch; ``scoring.base_rows`` says what is in it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from filelock import FileLock

from qbench.errors import ResultsError
from qbench.files import mark_used, write_atomically
from qbench.store import KEY_DIGITS

ABOUT = "about"  # the one entry of the file's metadata: several come in no fixed order
REMEDY = "run the unquantized cell again"


def base_rows_file(folder: Path, key: str) -> Path:
    """Where the rows of the unquantized cell ``key`` are kept."""
    return folder / f"{key[:KEY_DIGITS]}.safetensors"


def base_rows_usable(path: Path, key: str) -> bool:
    """Whether the file is there, whole and of the cell ``key``. Reads all of it."""
    try:
        verified(path, key)
    except ResultsError:
        return False
    return True


def locked(path: Path) -> FileLock:
    """Held while the file and its checksum change: runs into several results folders may share a
    cache, and score the same unquantized cell at the same time."""
    return FileLock(path.with_name(f"{path.name}.lock"))


def write_checksum(path: Path, digest: str) -> None:
    """Beside the file, as ``sha256sum -c`` reads it."""
    write_atomically(checksum_file(path), f"{digest}  {path.name}\n".encode())
    shutil.copymode(checksum_file(path), path)  # safetensors writes for its owner's eyes alone


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verified(path: Path, key: str) -> dict[str, Any]:
    """What the file says of itself, ``key`` and ``tasks``. Raises ResultsError where it is not
    there, not what was written, or another cell's."""
    from safetensors import SafetensorError, safe_open

    try:
        matches = _matches(path)
        if not matches and os.access(path.parent, os.W_OK):
            with locked(path):  # another run was between the file and its checksum, perhaps
                matches = _matches(path)
        if not matches:
            raise ResultsError(f"{path}: its SHA-256 is not the stated one; {REMEDY}")
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {}).get(ABOUT, "{}"))
    except (OSError, ValueError, SafetensorError) as error:
        raise ResultsError(f"{path}: {error}; {REMEDY}") from error
    if about.get("key") != key:
        raise ResultsError(f"{path}: of another cell than {key[:KEY_DIGITS]}; {REMEDY}")
    mark_used(path)
    return about


def _matches(path: Path) -> bool:
    stated = checksum_file(path).read_text().split()
    return bool(stated) and sha256(path) == stated[0]


def checksum_file(path: Path) -> Path:
    """Where the SHA-256 of the file stands."""
    return path.with_name(f"{path.name}.sha256")
