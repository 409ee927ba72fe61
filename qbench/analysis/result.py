"""The result of a cell's analysis, whether it succeeds or not. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from qbench.analysis.analyzed_text import AnalysisSettings
from qbench.cell_result import CellResult
from qbench.records import Analysis, Sensitivity
from qbench.store import Analyses


@dataclass(kw_only=True, slots=True)
class AnalysisResult(CellResult):
    """What an analysis has measured so far; it is kept if the analysis fails."""

    analyses: Analyses
    settings: AnalysisSettings
    contents: dict[str, Any] = field(default_factory=dict)  # fields of the record, as measured

    def put(
        self, status: Literal["ok", "unfinished", "failed"], error: str | None
    ) -> Analysis | Sensitivity:
        """Save the record unless it would replace a good one by a failed one; return the record."""
        kind = self.analyses.kind
        fields = self.common_fields(error) | self.contents | {"status": status}
        if kind is Sensitivity:
            del fields["attention"]
            fields["unit"] = "block" if self.settings.blocks else "linear"
        record = kind(**fields)
        earlier = self.analyses.get_valid(record)
        if status == "ok" or earlier is None or earlier.status != "ok":
            self.analyses.put(record)
        return record
