"""The unquantized cell as its quantized ones find it: its record, and where the hidden states lie
that it kept. Imports no torch; ``evaluation.kl`` says what is in them.

    CACHE/distributions/<key16>.safetensors           hidden states of every scored token, LM head
    CACHE/distributions/<key16>.safetensors.digest    of its parts, as those of artifacts

They take scored tokens × hidden size × bytes of the dtype.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from qbench.errors import ResultsError
from qbench.files import digest_of_parts, mark_used
from qbench.records import KEY_DIGITS, GridCell, Record
from qbench.store import Store

ABOUT = "about"  # the one entry of the file's metadata: several come in no fixed order
REMEDY = "run the unquantized cell again"


def read_baseline(cell: GridCell, store: Store, cache: Path) -> Record:
    """The good record of the unquantized ``cell``, whose hidden states in ``cache`` are verified.
    Raises ResultsError where it cannot be used."""
    record = store.get_valid(cell)
    if record is None or record.status != "ok":
        raise ResultsError(
            f"{cell.cell} has no finished record; run that cell first, then this one again"
        )
    verify_baseline(baseline_file(cache, cell.key), cell.key)
    return record


def baseline_file(cache: Path, key: str) -> Path:
    """Where the hidden states of the unquantized cell ``key`` are kept."""
    return cache / "distributions" / f"{key[:KEY_DIGITS]}.safetensors"


def checksum_file(path: Path) -> Path:
    """Where the digest of the file stands, that of ``files.digest_of_parts``."""
    return path.with_name(f"{path.name}.digest")


def verify_baseline(path: Path, key: str) -> None:
    """Reads the file whole. Raises ResultsError where it is not there, not what was written, or
    another cell's."""
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
