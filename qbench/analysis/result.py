"""One cell that is analyzed, and what is known of it so far. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from qbench.analysis.text import AnalysisSettings
from qbench.cell_result import CellResult
from qbench.plan import Cell
from qbench.records import Analysis, CellKey, Sensitivity
from qbench.store import Analyses


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
    found: dict[str, Any] = field(default_factory=dict)  # what was measured, as the record has it

    def put(
        self, status: Literal["ok", "unfinished", "failed"], error: str | None
    ) -> Analysis | Sensitivity:
        """Write the record of what is known; a good one that is there is replaced by none that is
        not."""
        cell, kind = self.cell, self.analyses.kind
        stated = self.result.stated(error) | self.found
        stated |= {"key": cell.key, "key_parts": cell.key_parts, "status": status}
        if kind is Sensitivity:
            del stated["attention"]
            stated["unit"] = "block" if cell.settings.blocks else "linear"
        record = kind(**stated)
        known = self.analyses.whole(record)
        if status == "ok" or known is None or known.status != "ok":
            self.analyses.put(record)
        return record
