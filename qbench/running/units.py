"""Work on the cells of a plan, one after the other, that other hosts can do: what is known of a
cell where the results are, what is done elsewhere, and what is kept of it. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from qbench.plan import Plan
from qbench.progress import Progress, RemoteProgress
from qbench.records import GridCell

DIED = "its process was killed (out of memory?); see its log"


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What came of one cell elsewhere: its record, tables as they were written there, its log."""

    record: Any
    tables: Mapping[str, bytes]
    log: str

    @property
    def error(self) -> str | None:
        return getattr(self.record, "error", None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """What damage of a cell is taken against: the unquantized cell, and its record's files."""

    cell: GridCell
    files: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class There:
    """What it finds where it is done: ``texts`` are its files by their SHA-256, ``out`` is the
    folder that it is made in."""

    texts: Mapping[str, Path]
    out: Path
    cache: Path
    progress: Progress | RemoteProgress
    force: bool = False


class Remote(Protocol):
    """What is sent to do it. It can be pickled, and comes beside the plan, whose files are found
    where it is done."""

    def tasks(self, plan: Plan) -> Sequence[str]:
        """Names of the tasks whose data it reads."""
        return [task.name for task in plan.tasks]

    def texts(self) -> Sequence[tuple[Path, str]]:
        """Other files that it reads, with their SHA-256."""
        return ()

    def run(self, plan: Plan, name: str, there: There) -> Made | None:
        """The cell ``name``, made if need be; None where another process holds it there."""
        ...


@runtime_checkable
class Unit(Protocol):
    """Work on the cells of ``plan``, as the host of the run has it."""

    plan: Plan

    def remote(self, name: str) -> Remote: ...

    def lock_file(self, name: str) -> Path:
        """Held while a run is at work on the cell."""

    def kept(self, name: str) -> str:
        """What the names of its files begin with, below a results folder."""

    def log_file(self, name: str) -> Path: ...

    def awaits(self, name: str) -> str | None:
        """The cell that must be done before, where it is of the same run."""
        return None

    def base(self, name: str) -> Base | None:
        """What it is measured against, where that is there."""
        return None

    def known(
        self, name: str, *, say: Callable[..., None], problem: Callable[[str], str | None]
    ) -> Any | None:
        """Its good record; None where it is to be made. ``problem`` says why the rows of an
        unquantized cell, by its key, cannot be used."""
        return None

    def adopt(self, name: str, made: Made) -> Any:
        """Write what came of it; its record."""

    def failed(self, name: str, error: str) -> Any:
        """Write that it failed, and never gave a record itself; that record."""


class Hosts(Protocol):
    """An executor over other hosts."""

    def relay(self, progress: Progress) -> AbstractContextManager[object]: ...

    def submit(self, fn: Unit, name: str, /, *, force: bool = False) -> Future: ...


def run_units(
    unit: Unit, names: Sequence[str], *, executor: Hosts, progress: Progress, force: bool = False
) -> list[Any]:
    """Records of the cells ``names``, in order, made on other hosts."""
    found = []
    with executor.relay(progress):
        futures = [executor.submit(unit, name, force=force) for name in names]
        for name, future in zip(names, futures, strict=True):
            try:
                found.append(future.result())
            except (BrokenExecutor, CancelledError) as error:
                found.append(unit.failed(name, str(error) or DIED))
    return found
