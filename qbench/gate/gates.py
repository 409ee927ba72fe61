"""What the gate asks and answers, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qbench.comparison.changes import Change
from qbench.statistics import Worsening

Outcome = Literal["pass", "fail", "inconclusive"]
Inconclusive = Literal["pass", "fail"]
AUDIT = "audit"  # stands for the task in questions about the audit


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One question of the gate. Without ``task`` the cell as a whole could not be asked."""

    cell: str
    task: str
    metric: str
    outcome: Outcome
    reason: str
    margin: float | None = None  # percentage points for accuracies, else per cent
    given: bool = False  # whether the user stated the margin
    worse: Worsening | None = None  # in the margin's units
    needed: int | None = None  # documents that it would take, where inconclusive
    supported: float | None = None  # the margin that so many documents support
    change: Change | None = None

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.cell, self.task, self.metric) if part)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """All questions and the answer. ``exit_code``: 0 pass, 1 fail; unusable input raises (2)."""

    results: str
    baseline: str
    gates: tuple[Gate, ...]
    notes: tuple[str, ...]
    inconclusive: Inconclusive  # what an inconclusive question counts as

    @property
    def outcome(self) -> Outcome:
        outcomes = {gate.outcome for gate in self.gates}
        if "fail" in outcomes:
            return "fail"
        return "inconclusive" if "inconclusive" in outcomes else "pass"

    @property
    def exit_code(self) -> int:
        counted = self.inconclusive if self.outcome == "inconclusive" else self.outcome
        return 0 if counted == "pass" else 1

    def count(self, outcome: Outcome) -> int:
        return sum(gate.outcome == outcome for gate in self.gates)


def whole(cell: str, reason: str) -> Gate:
    """A cell that fails as a whole."""
    return Gate(cell=cell, task="", metric="", outcome="fail", reason=reason)
