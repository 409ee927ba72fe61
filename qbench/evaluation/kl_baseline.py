"""Find and verify the files that damage is measured against. Imports no torch;
``evaluation.kl_observer`` says what is in them.

    CACHE/distributions/<key16>.safetensors           hidden states of a task's scored tokens
    CACHE/distributions/<key16>.safetensors           the LM head, under a key without tasks
    CACHE/distributions/<key16>.safetensors.digest    of its parts, as those of artifacts

The key of a task's file is :func:`qbench.store.task_key`. Files take scored tokens × hidden size ×
bytes of the dtype, the head vocabulary × hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from qbench.errors import ResultsError
from qbench.files import digest_of_parts, mark_used
from qbench.records import KEY_DIGITS, Record
from qbench.store import head_key, task_key

if TYPE_CHECKING:
    from qbench.plan import Cell
    from qbench.store import Store

ABOUT = "about"  # the one entry of the file's metadata: several come in no fixed order
REMEDY = "run the unquantized cell again"


def read_baseline(cell: Cell, store: Store) -> Record:
    """Return the good record of the unquantized ``cell``. Raises ResultsError if there is none."""
    record = store.get_valid(cell.grid_cell)
    if record is None or record.status != "ok":
        raise ResultsError(
            f"{cell.name} has no finished record; run that cell first, then this one again"
        )
    return record


def baseline_file(cache: Path, key: str) -> Path:
    """Return the file of a task's hidden states, or of the LM head, under ``key``."""
    return cache / "distributions" / f"{key[:KEY_DIGITS]}.safetensors"


def baseline_files(
    cache: Path, parts: Mapping[str, Any], tasks: Iterable[str] | None = None
) -> dict[Path, str]:
    """Return the files of ``tasks`` (None: all) and of the LM head, each with its key, of the
    unquantized cell with the key parts ``parts``."""
    keys = [head_key(parts), *(task_key(parts, task) for task in tasks or parts["tasks"])]
    return {baseline_file(cache, key): key for key in keys}


def checksum_file(path: Path) -> Path:
    """Return where the digest of a file stands, that of ``files.digest_of_parts``."""
    return path.with_name(f"{path.name}.digest")


def verify_baseline(path: Path, key: str) -> None:
    """Read the whole file. Raises ResultsError if it is missing, not what was written, or under
    another key."""
    try:
        matches = checksum_file(path).read_text().strip() == digest_of_parts(path)
        about = {}
        if matches:
            with safe_open(path, framework="numpy") as file:
                about = json.loads((file.metadata() or {}).get(ABOUT, "{}"))
    except (OSError, ValueError, SafetensorError) as error:
        raise ResultsError(f"{path}: {error}; {REMEDY}") from error
    if not matches:
        raise ResultsError(f"{path}: its digest differs from the stated one; {REMEDY}")
    if about.get("key") != key:
        raise ResultsError(f"{path}: of another cell than {key[:KEY_DIGITS]}; {REMEDY}")
    mark_used(path)
