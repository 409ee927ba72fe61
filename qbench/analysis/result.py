"""One cell that is analyzed, and what is known of it so far. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from qbench.analysis.text import AnalysisSettings
from qbench.cell_result import CellResult
from qbench.plan import Cell
from qbench.records import (
    Analysis,
    AnalyzedText,
    CellKey,
    Measured,
    Sensitivity,
    UnitSensitivity,
)
from qbench.store import Analyses

TOGETHER = "all"  # of a sensitivity's units: all of them at once


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
    def grid_cell(self) -> CellKey:
        return CellKey(
            checkpoint=self.cell.checkpoint_name, quantizer=self.cell.label, key=self.key
        )


@dataclass(kw_only=True, slots=True)
class AnalysisResult:
    """What is known so far of a cell that is analyzed; a failure leaves the rest as it is."""

    cell: AnalysisCell
    analyses: Analyses
    result: CellResult
    text: AnalyzedText | None = None
    measured: Measured | None = None
    perplexity: float | None = None
    units: dict[str, UnitSensitivity] = field(default_factory=dict)

    def put(
        self, status: Literal["ok", "unfinished", "failed"], error: str | None
    ) -> Analysis | Sensitivity:
        """Write the record of what is known."""
        cell, stated = self.cell, self.result.stated(error)
        stated |= {"key": cell.key, "key_parts": cell.key_parts, "status": status}
        record: Analysis | Sensitivity
        if self.analyses.kind is Sensitivity:
            del stated["attention"]
            record = Sensitivity(
                **stated,
                text=self.text,
                unit="block" if cell.settings.blocks else "linear",
                perplexity=self.perplexity,
                together=self.units.get(TOGETHER),
                units=tuple(one for name, one in self.units.items() if name != TOGETHER),
            )
        else:
            record = Analysis(**stated, text=self.text, measured=self.measured)
        self.analyses.put(record)
        return record
