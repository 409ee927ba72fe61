"""The parts of an analysis: reading a text, a longer one, one layer quantized at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qbench.cli.job import Place
from qbench.machine import terminal

if TYPE_CHECKING:
    from qbench.analyses import Analyses
    from qbench.analysis.plan import AnalysisCell
    from qbench.analysis.settings import AnalysisSettings
    from qbench.plan import Plan
    from qbench.records import Analysis, Sensitivity


@dataclass(frozen=True, kw_only=True)
class Part:
    """Cells of one kind that are to be analyzed: the tokens of a text, what is said of it besides,
    where analyses of other texts or settings were replaced, the cells, what makes one of them, and
    what notes one that left nothing itself."""

    length: int
    apart: str = ""
    replaced: str | None
    cells: tuple[AnalysisCell, ...]
    make: Callable[..., Analysis | Sensitivity]
    failed: Callable[[AnalysisCell, str], Analysis | Sensitivity]

    @property
    def counted(self) -> str:
        return f"{len(self.cells)} cell{'s' if len(self.cells) != 1 else ''}"


def parts_of(
    plan: Plan,
    settings: AnalysisSettings,
    out: Path,
    only: str | None,
    long_context: int | None,
    sensitivity: str | None,
    *,
    blocks: bool,
) -> list[Part]:
    from qbench.analyses import LONG_CONTEXT
    from qbench.analysis.plan import chosen
    from qbench.plan import require_runnable

    cells = chosen(plan, only)
    require_runnable(cells)
    wanted = {cell.name for cell in cells}
    parts = [_analyses(plan, settings, out, wanted)]
    if long_context is not None:
        parts.append(
            _analyses(plan, replace(settings, length=long_context), out, wanted, LONG_CONTEXT)
        )
    if sensitivity is not None:
        own = replace(settings, blocks=blocks)
        parts.append(_sensitivities(plan, sensitivity, own, out, wanted))
    return parts


def _analyses(
    plan: Plan, settings: AnalysisSettings, out: Path, wanted: set[str], part: str = ""
) -> Part:
    from qbench.analyses import Analyses
    from qbench.analysis.plan import analysis_grid, plan_analyses
    from qbench.analysis.run import analyze_if_needed, failed

    cells = plan_analyses(plan, settings)
    analyses: Analyses[Analysis] = Analyses(out, part=part)
    others = analyses.put_grid(analysis_grid(plan, cells))
    chosen = tuple(cell for cell in cells if cell.name in wanted)
    return Part(
        length=settings.length,
        replaced=str(analyses.folder) if others else None,
        cells=chosen,
        make=partial(analyze_if_needed, plan=plan, analyses=analyses),
        failed=partial(_noted, failed, plan, analyses),
    )


def _sensitivities(
    plan: Plan, label: str, settings: AnalysisSettings, out: Path, wanted: set[str]
) -> Part:
    """Of the checkpoints of the ``wanted`` cells."""
    from qbench.analyses import sensitivities
    from qbench.analysis.plan import plan_sensitivities
    from qbench.analysis.sensitivity_run import failed, measure_if_needed, put_grid

    checkpoints = {cell.checkpoint_name for cell in plan.cells if cell.name in wanted}
    cells = tuple(
        cell
        for cell in plan_sensitivities(plan, label, settings)
        if cell.cell.checkpoint_name in checkpoints
    )
    analyses = sensitivities(out)
    put_grid(analyses, cells, plan.recipe.name)
    unit = "decoder layer" if settings.blocks else "linear layer"
    return Part(
        length=settings.length,
        apart=f", one {unit} at a time",
        replaced=None,
        cells=cells,
        make=partial(measure_if_needed, plan=plan, out=analyses),
        failed=partial(_noted, failed, plan, analyses),
    )


def _noted(
    failed: Callable[..., Analysis | Sensitivity],
    plan: Plan,
    analyses: Analyses,
    cell: AnalysisCell,
    error: str,
) -> Analysis | Sensitivity:
    record = failed(cell, plan, error)
    analyses.put(record)
    return record


def run_part(
    part: Part, settings: AnalysisSettings, place: Place, *, force: bool
) -> list[Analysis | Sensitivity]:
    """Make what is not there yet; returns those that failed."""
    from qbench.runner.grid import run_each
    from qbench.runner.progress import Display

    with terminal() as screen, Display(screen, len(part.cells)) as display:
        display.log(
            f"{part.counted} on {settings.device}: at most {settings.samples} texts of "
            f"{part.length} tokens of {settings.source.name}{part.apart}"
        )
        if place.description:
            display.log(place.description)
        if part.replaced:
            display.log(
                f"{part.replaced} held analyses of other texts, settings or versions; their "
                "records stay, its tables now show this one's (say --out to keep both)"
            )
        if place.executor is None:
            found = [part.make(cell, progress=display, force=force) for cell in part.cells]
        else:
            found = run_each(
                partial(part.make, force=force), part.cells,
                executor=place.executor, progress=display, died=part.failed,
            )  # fmt: skip
    return [one for one in found if one.status != "ok"]
