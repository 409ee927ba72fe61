"""How the Parquet files of a record are called."""

from __future__ import annotations

from pathlib import Path

from qbench.record.record import Record

KEY_DIGITS = 16  # of keys and checksums in names


def table_path(path: Path, record: Record, name: str) -> Path:
    """Of the table ``name`` of the record at ``path``: its checksum is part of the name, so that
    a table never replaces one that an older record still states."""
    return path.with_suffix(f".{record.files[name].sha256[:KEY_DIGITS]}.{name}.parquet")


def is_table(path: Path, name: str) -> bool:
    """Whether a file is called as a table of the record at ``path``."""
    parts = name.removeprefix(f"{path.stem}.").split(".")
    return (
        name.startswith(f"{path.stem}.")
        and len(parts) == 3
        and len(parts[0]) == KEY_DIGITS
        and parts[2] == "parquet"
    )
