"""Where something was made. Imports no torch."""

from __future__ import annotations

from pydantic import Field

from qbench.record.written import Written


class Environment(Written):
    """Where a record was made."""

    python: str
    platform: str
    device: str  # "cpu" or "cuda"
    hardware: str  # name of the processor or GPU
    versions: dict[str, str]  # distribution name → version
    git_revision: str | None
    qbench: str
    plugins: dict[str, str] = Field(
        default_factory=dict
    )  # files with their SHA-256, packages with their version
