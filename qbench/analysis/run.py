"""Plan of a run → the analyses of its cells, each with its content key → their records.

Imports no torch before a cell is analyzed.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from qbench.analysis.result import AnalysisCell, AnalysisResult
from qbench.analysis.text import AnalysisSettings
from qbench.cell_result import CellResult
from qbench.code import digest_of
from qbench.errors import RecipeError, shown
from qbench.machine import attempt
from qbench.plan import Cell, Plan, content_key
from qbench.progress import Progress
from qbench.records import Analysis, AnalysisGrid, Sensitivity
from qbench.store import Analyses

# Of a cell's key: what decides the model. Tasks, scoring and damage do not.
MODEL_PARTS = (
    *("weights", "normalizer", "normalizer source", "quantizer", "attention", "device", "gpu"),
    *("versions", "code", "calibration"),
)


def plan_analyses(plan: Plan, settings: AnalysisSettings) -> tuple[AnalysisCell, ...]:
    """Of all cells of ``plan``, in its order."""
    stated = {"kind": "analysis", "analysis": settings.key_parts() | {"heads": settings.heads}}
    return _cells(plan.cells, settings, stated)


def plan_sensitivities(
    plan: Plan, label: str, settings: AnalysisSettings
) -> tuple[AnalysisCell, ...]:
    """Of all checkpoints under the recipe's quantizer ``label``. Raises RecipeError where it has
    none of that name, or where that quantizes no weights or activations of linear layers, treats
    outliers of the whole model, or is a copy without its original."""
    cells = tuple(cell for cell in plan.cells if cell.label == label)
    if not cells:
        labels = ", ".join(dict.fromkeys(cell.label for cell in plan.cells))
        raise RecipeError(
            f"--sensitivity {shown(label)}: the recipe has no such quantizer; it has {labels}"
        )
    precision = cells[0].quantization.precision
    if any(cell.alone for cell in cells):
        raise RecipeError(
            f"--sensitivity {label}: the original of a published copy is not there; name it under "
            "checkpoints, and the copy as the path of this quantizer"
        )
    if precision.weights is None and precision.activations is None:
        raise RecipeError(
            f"--sensitivity {label}: quantizes neither weights nor activations of linear layers; "
            "name another quantizer of the recipe"
        )
    if cells[0].quantization.transform is not None:
        raise RecipeError(
            f"--sensitivity {label}: treats outliers of the whole model at once, so no layer can "
            "be quantized alone; name one that does not"
        )
    unit = "block" if settings.blocks else "linear"
    stated = {"kind": "sensitivity", "unit": unit, "analysis": settings.key_parts()}
    return _cells(cells, settings, stated)


def _cells(
    wanted: tuple[Cell, ...], settings: AnalysisSettings, stated: dict[str, Any]
) -> tuple[AnalysisCell, ...]:
    code = digest_of([Path(__file__).parent])
    cells = []
    for cell in wanted:
        parts = {name: cell.key_parts[name] for name in MODEL_PARTS if name in cell.key_parts}
        parts |= {"analysis code": code, **stated}
        cells.append(
            AnalysisCell(cell=cell, settings=settings, key=content_key(parts), key_parts=parts)
        )
    return tuple(cells)


def chosen(plan: Plan, only: str | None) -> tuple[Cell, ...]:
    """The cells that a glob names; without one the unquantized ones. RecipeError for none."""
    if only is not None:
        return plan.select(only)
    cells = tuple(cell for cell in plan.cells if not cell.quantization.precision.quantized)
    if not cells:
        names = ", ".join(cell.name for cell in plan.cells)
        raise RecipeError(
            "quantizers: none is unquantized (bf16, fp32), and only these are analyzed without "
            f"--only; the cells are {names}"
        )
    return cells


def analysis_grid(plan: Plan, cells: tuple[AnalysisCell, ...]) -> AnalysisGrid:
    return AnalysisGrid(
        name=plan.recipe.name,
        cells=tuple(cell.grid_cell for cell in cells),
        replicates=plan.recipe.groups,
    )


def put_sensitivity_grid(
    out: Analyses[Sensitivity], cells: Sequence[AnalysisCell], name: str
) -> None:
    """Say which are meant: ``cells``, and those of other cells that were asked for before."""
    fresh = [cell.grid_cell for cell in cells]
    before = out.grid_before()
    known = before.cells if before else ()
    kept = [one for one in known if one.cell not in {new.cell for new in fresh}]
    out.put_grid(AnalysisGrid(name=name, cells=(*kept, *fresh)))


def analyze_if_needed(
    cell: AnalysisCell, plan: Plan, analyses: Analyses, progress: Progress, *, force: bool
) -> Analysis | Sensitivity:
    """The cell's good record, made or finished now if need be; where another process is at work
    on it, that one's."""
    asked = datetime.now(UTC)
    with FileLock(analyses.lock_file(cell.grid_cell)):
        progress.begin(cell.name)
        try:
            known = analyses.whole(cell.grid_cell, progress.log)
            made_meanwhile = known is not None and known.started >= asked
            if known is not None and known.status == "ok" and (made_meanwhile or not force):
                what = "sensitivity already" if isinstance(known, Sensitivity) else "already"
                progress.log(f"{cell.name}: {what} there")
                return known
            found = _analyze(cell, plan, analyses, progress, None if force else known)
            progress.log(_summary(found), "bold red" if found.status == "failed" else "")
            return found
        finally:
            progress.end(cell.name)


def failed(
    plan: Plan, analyses: Analyses, cell: AnalysisCell, error: str
) -> Analysis | Sensitivity:
    """The record, put into its place, of a cell that left none itself."""
    result = CellResult(cell=cell.cell, plan=plan)
    return AnalysisResult(cell=cell, analyses=analyses, result=result).put("failed", error)


def _analyze(
    cell: AnalysisCell,
    plan: Plan,
    analyses: Analyses,
    progress: Progress,
    before: Analysis | Sensitivity | None,
) -> Analysis | Sensitivity:
    """Analyze one cell and put the record into its place, whether it worked or not. A sensitivity
    goes on from the units that the record ``before`` has."""
    result = CellResult(cell=cell.cell, plan=plan, progress=progress)
    found = AnalysisResult(cell=cell, analyses=analyses, result=result)
    if isinstance(before, Sensitivity):
        found.found["units"] = before.units

    def work() -> None:
        from qbench.analysis.cell import compute

        compute(found)

    error = attempt(work, analyses.log(cell.grid_cell), plan.device)
    return found.put("failed" if error else "ok", error)


def _summary(found: Analysis | Sensitivity) -> str:
    """One line on what an analysis gave and what it cost."""
    if found.status != "ok" or found.text is None:
        return f"{found.cell}: FAILED: {found.error}"
    cost = ", ".join(f"{stage.name} {stage.seconds:.1f} s" for stage in found.stages)
    if isinstance(found, Sensitivity):
        what = "decoder layers" if found.unit == "block" else "linear layers"
        return f"{found.cell}: {len(found.units)} {what}, one at a time ({cost})"
    text = f"{found.text.samples} texts of {found.text.length} tokens"
    return f"{found.cell}: analyzed on {text} ({cost})"
