"""The files of what an unquantized cell keeps for its quantized ones: where they are, whether
they are whole. Imports no torch; ``scoring.base_rows`` says what is in them.

Each task's rows, and the LM head, are a part: a file named by the cell's key and its own SHA-256,
so that parts of two runs never mix. The index names the parts, and is written last.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from qbench.errors import ResultsError
from qbench.files import mark_used, write_atomically
from qbench.store import KEY_DIGITS

ABOUT = "about"  # the one entry of a file's metadata: several come in no fixed order
PART = ".rows"
REMEDY = "run the unquantized cell again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """SHA-256 of each part: of the LM head, None before any token was scored, and of each task in
    the order of scoring, None where none of its tokens are scored."""

    head: str | None = None
    tasks: dict[str, str | None] = field(default_factory=dict)

    @property
    def digests(self) -> list[str]:
        return [digest for digest in (self.head, *self.tasks.values()) if digest is not None]


def base_rows_file(folder: Path, key: str) -> Path:
    """Where the index of the rows of the unquantized cell ``key`` is kept."""
    return folder / f"{key[:KEY_DIGITS]}.safetensors"


def part_file(path: Path, digest: str) -> Path:
    """A part's, beside the index ``path``."""
    return path.with_name(f"{path.stem}.{digest[:KEY_DIGITS]}{PART}")


def base_rows_usable(path: Path, key: str) -> bool:
    """Whether the index and its parts are there, whole and of the cell ``key``. Reads them all."""
    try:
        verified(path, key)
    except ResultsError:
        return False
    return True


def locked(path: Path) -> FileLock:
    """Held while the index and its checksum change: runs into several results folders may share a
    cache, and score the same unquantized cell at the same time."""
    return FileLock(path.with_name(f"{path.name}.lock"))


def making(path: Path) -> FileLock:
    """Held by a cell at work, of which parts are there and no index yet: they are not pruned."""
    return FileLock(path.with_name(f"{path.stem}.making.lock"))


def write_checksum(path: Path, digest: str) -> None:
    """Beside the file, as ``sha256sum -c`` reads it."""
    write_atomically(checksum_file(path), f"{digest}  {path.name}\n".encode())
    shutil.copymode(checksum_file(path), path)  # safetensors writes for its owner's eyes alone


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verified(path: Path, key: str) -> Parts:
    """The parts, each of which was read whole. Raises ResultsError where one or the index is not
    there, not what was written, or another cell's."""
    parts = stated(path, key)
    for digest in parts.digests:
        verify_part(path, digest)
    return parts


def verify_part(path: Path, digest: str) -> Path:
    """The part's file, read whole. Raises ResultsError where it is not there or not what was
    written."""
    part = part_file(path, digest)
    try:
        matches = sha256(part) == digest
    except OSError as error:
        raise ResultsError(f"{part}: {error}; {REMEDY}") from error
    if not matches:
        raise ResultsError(f"{part}: its SHA-256 is not the stated one; {REMEDY}")
    return part


def stated(path: Path, key: str) -> Parts:
    """What the index says, whose parts are not looked at. Raises ResultsError where it is not
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
    if about.get("key") != key or "head" not in about:
        raise ResultsError(f"{path}: of another cell than {key[:KEY_DIGITS]}; {REMEDY}")
    mark_used(path)
    return Parts(head=about["head"], tasks=about["tasks"])


def handed_over(path: Path) -> Parts:
    """What an unquantized cell at work says in the file ``path`` that it has kept by now."""
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return Parts()
    return Parts(head=said["head"], tasks=said["tasks"])


def _matches(path: Path) -> bool:
    stated = checksum_file(path).read_text().split()
    return bool(stated) and sha256(path) == stated[0]


def checksum_file(path: Path) -> Path:
    """Where the SHA-256 of the file stands."""
    return path.with_name(f"{path.name}.sha256")
