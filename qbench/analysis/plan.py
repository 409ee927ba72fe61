"""Plan of a run → the analyses of its cells, each with its content key. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbench.analysis.settings import AnalysisSettings
from qbench.code import digest_of
from qbench.errors import RecipeError, shown
from qbench.plan import Cell, Plan, content_key
from qbench.records import AnalysisGrid, AnalysisGridCell

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
    stated = {"kind": "analysis", "analysis": settings.key_parts() | settings.map_heads}
    return _cells(plan.cells, settings, stated)


def plan_sensitivities(
    plan: Plan, label: str, settings: AnalysisSettings
) -> tuple[AnalysisCell, ...]:
    """Of all checkpoints under the recipe's quantizer ``label``. Raises RecipeError where it has
    none of that name, or where that quantizes no weights or activations of linear layers, or treats
    outliers of the whole model."""
    cells = tuple(cell for cell in plan.cells if cell.label == label)
    if not cells:
        labels = ", ".join(dict.fromkeys(cell.label for cell in plan.cells))
        raise RecipeError(
            f"--sensitivity {shown(label)}: the recipe has no such quantizer; it has {labels}"
        )
    precision = cells[0].quantization.precision
    if precision.weights is None and precision.activations is None:
        raise RecipeError(
            f"--sensitivity {label}: quantizes neither weights nor activations of linear layers; "
            "name another quantizer of the recipe"
        )
    if cells[0].quantization.transform is not None:
        raise RecipeError(
            f"--sensitivity {label}: treats outliers of the whole model at once, so that no layer "
            "can be quantized alone; name a quantizer without"
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
            f"quantizers: none is unquantized (bf16, fp32), and these are what is analyzed unless "
            f"--only names others; the cells are {names}"
        )
    return cells


def analysis_grid(plan: Plan, cells: tuple[AnalysisCell, ...]) -> AnalysisGrid:
    return AnalysisGrid(
        name=plan.recipe.name,
        cells=tuple(cell.grid_cell for cell in cells),
        replicates=plan.recipe.groups,
    )
