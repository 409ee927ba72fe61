"""Analyses as work that other hosts can do: each of a cell by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from qbench.analyses import SENSITIVITY, Analyses
from qbench.analysis.plan import AnalysisCell, plan_analyses, plan_sensitivities
from qbench.analysis.settings import AnalysisSettings, TextFile
from qbench.files import write_atomically
from qbench.plan import Plan
from qbench.records import Analysis, Sensitivity
from qbench.running.units import Made, Remote, There, Unit
from qbench.running.work import opened


@dataclass(frozen=True, kw_only=True)
class AnalysisUnit(Unit):
    """The ``cells`` of one part of the analyses in ``out``: ``part`` names it, and ``label`` the
    quantizer that sensitivity is of."""

    plan: Plan
    out: Path
    part: str
    settings: AnalysisSettings
    cells: tuple[AnalysisCell, ...]
    label: str | None = None

    def remote(self, name: str) -> RemoteAnalyses:
        before = self._analyses.whole(self._cell(name).grid_cell, _silent)
        return RemoteAnalyses(
            part=self.part, settings=self.settings, label=self.label, before=before
        )

    def lock_file(self, name: str) -> Path:
        return self._analyses.lock_file(self._cell(name).grid_cell)

    def kept(self, name: str) -> str:
        return self.log_file(name).with_suffix("").relative_to(self.out).as_posix()

    def log_file(self, name: str) -> Path:
        return self._analyses.log(self._cell(name).grid_cell)

    def known(
        self, name: str, *, say: Callable[..., None], problem: Callable[[str], str | None]
    ) -> Analysis | Sensitivity | None:
        found = self._analyses.whole(self._cell(name).grid_cell, say)
        return found if found is not None and found.status == "ok" else None

    def adopt(self, name: str, made: Made) -> Analysis | Sensitivity:
        write_atomically(self.log_file(name), made.log.encode())
        self._analyses.put(made.record)
        return made.record

    def failed(self, name: str, error: str) -> Analysis | Sensitivity:
        from qbench.analysis import run, sensitivity_run

        make = run.failed if self.label is None else sensitivity_run.failed
        record = make(self._cell(name), self.plan, error)
        self._analyses.put(record)
        return record

    @property
    def _analyses(self) -> Analyses:
        return _analyses(self.out, self.part)

    def _cell(self, name: str) -> AnalysisCell:
        return next(cell for cell in self.cells if cell.name == name)


@dataclass(frozen=True, kw_only=True)
class RemoteAnalyses(Remote):
    """Analyses on another host. ``before`` is what is known of the cell: a sensitivity that was
    stopped goes on from there."""

    part: str
    settings: AnalysisSettings
    label: str | None
    before: Analysis | Sensitivity | None

    def tasks(self, plan: Plan) -> Sequence[str]:
        source = self.settings.source
        return () if isinstance(source, TextFile) else (source.task.name,)

    def texts(self) -> Sequence[tuple[Path, str]]:
        source = self.settings.source
        return ((source.path, source.digest),) if isinstance(source, TextFile) else ()

    def run(self, plan: Plan, name: str, there: There) -> Made | None:
        from qbench.analysis.run import analyze_if_needed
        from qbench.analysis.sensitivity_run import measure_if_needed

        alone = dataclasses.replace(plan, cells=(plan.cell(name),))
        settings = self._here(plan, there.texts)
        (cell,) = (
            plan_analyses(alone, settings)
            if self.label is None
            else plan_sensitivities(alone, self.label, settings)
        )
        analyses = _analyses(there.out, self.part)
        try:
            with FileLock(analyses.lock_file(cell.grid_cell), timeout=0):
                pass
        except Timeout:
            return None
        if self.before is not None and analyses.whole(cell.grid_cell, _silent) is None:
            analyses.put(self.before)
        make: Any = analyze_if_needed if self.label is None else measure_if_needed
        with opened(there.progress) as told:
            record = make(cell, plan, analyses, told, force=there.force)
        log = analyses.log(cell.grid_cell)
        text = log.read_text(errors="replace") if log.is_file() else ""
        return Made(record=record, tables={}, log=text)

    def _here(self, plan: Plan, texts: Mapping[str, Path]) -> AnalysisSettings:
        """With the text as it lies on this host."""
        source = self.settings.source
        if isinstance(source, TextFile):
            found = dataclasses.replace(source, path=texts[source.digest])
        else:
            task = next(task for task in plan.tasks if task.name == source.task.name)
            found = dataclasses.replace(source, task=task)
        return dataclasses.replace(self.settings, source=found)


def _analyses(out: Path, part: str) -> Analyses:
    return Analyses(out, Sensitivity if part == SENSITIVITY else Analysis, part)


def _silent(line: str) -> None:
    """What is wrong with an earlier record is said where it is looked for."""
