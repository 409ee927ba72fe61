"""Plan of a run → the analyses of its cells, each with its content key. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbench.analysis.settings import AnalysisSettings
from qbench.code import digest_of
from qbench.errors import RecipeError
from qbench.plan import Cell, Plan, content_key
from qbench.record.analysis import AnalysisGrid, AnalysisGridCell

# Of a cell's key: what decides the model. Tasks, scoring and damage do not.
MODEL_PARTS = (
    *("weights", "normalizer", "normalizer source", "quantizer", "attention", "device", "gpu"),
    *("versions", "code", "calibration"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalysisCell:
    """One cell of a plan, to be analyzed."""

    cell: Cell
    settings: AnalysisSettings
    key: str
    key_parts: dict[str, Any]

    @property
    def name(self) -> str:
        return self.cell.name

    @property
    def grid_cell(self) -> AnalysisGridCell:
        return AnalysisGridCell(
            checkpoint=self.cell.checkpoint_name, quantizer=self.cell.label, key=self.key
        )


def plan_analyses(plan: Plan, settings: AnalysisSettings) -> tuple[AnalysisCell, ...]:
    """Of all cells of ``plan``, in its order."""
    code = digest_of(Path(__file__).parent)
    cells = []
    for cell in plan.cells:
        parts = {name: cell.key_parts[name] for name in MODEL_PARTS if name in cell.key_parts}
        parts |= {"kind": "analysis", "analysis code": code, "analysis": settings.key_parts()}
        cells.append(
            AnalysisCell(cell=cell, settings=settings, key=content_key(parts), key_parts=parts)
        )
    return tuple(cells)


def chosen(plan: Plan, only: str | None) -> tuple[Cell, ...]:
    """The cells that a glob names; without one the unquantized ones. RecipeError for none."""
    if only is not None:
        return plan.select(only)
    cells = tuple(cell for cell in plan.cells if not cell.quantizer.precision.quantized)
    if not cells:
        names = ", ".join(cell.name for cell in plan.cells)
        raise RecipeError(
            f"quantizers: none is unquantized (bf16, fp32), and these are what is analyzed unless "
            f"--only names others; the cells are {names}"
        )
    return cells


def analysis_grid(plan: Plan, cells: tuple[AnalysisCell, ...]) -> AnalysisGrid:
    return AnalysisGrid(name=plan.recipe.name, cells=tuple(cell.grid_cell for cell in cells))
