"""The CI gate: results against a baseline, by paired non-inferiority.

For each task and precision: is the new score at most a margin worse? *pass* where even the
one-sided 95 % bound is within the margin, *fail* where the other bound is beyond it, else
*inconclusive*. A cell that is missing, failed or unaudited fails. What the audit measured on the
weights is held to the baseline too, without statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qbench.comparison.changes import CellResults, Change, compare_sets, read_results
from qbench.comparison.statistics import Worsening, documents_needed, worsening
from qbench.errors import RecipeError, ResultsError
from qbench.gate.baseline import read
from qbench.store import Store

Outcome = Literal["pass", "fail", "inconclusive"]
Inconclusive = Literal["pass", "fail"]

# Percentage points for accuracies, per cent of the perplexity for perplexities.
DEFAULT_MARGINS = {"acc": 1.0, "perplexity": 2.0}
# Per cent by which a measure of the audit may be larger. Weights are measured, not sampled, so
# these see what scores cannot: scales 5 % off leave a small model's answers as they were.
AUDIT_MARGINS = {"weight_error": 5.0, "bits_per_weight": 1.0, "coverage": 0.0}
AUDIT = "audit"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One question of the gate. Without ``change`` the cell as a whole could not be asked."""

    cell: str
    task: str
    metric: str
    outcome: Outcome
    reason: str
    margin: float | None = None  # as the user states it
    worse: Worsening | None = None  # in the margin's units
    needed: int | None = None  # documents that it would take, where inconclusive
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


def parse_margins(texts: Sequence[str]) -> dict[str, float]:
    """``["acc=0.5", "word_perplexity=1"]`` over the defaults.

    ``acc`` and ``perplexity`` stand for all accuracies and all perplexities that are not named.
    Raises RecipeError for a text that is no margin.
    """
    margins = DEFAULT_MARGINS | AUDIT_MARGINS
    for text in texts:
        metric, _, number = text.partition("=")
        try:
            margin = float(number.removesuffix("%"))
        except ValueError:
            margin = math.nan
        if not metric or not math.isfinite(margin) or margin < 0:
            raise RecipeError(
                f"--margin {text}: write METRIC=NUMBER, such as acc=0.5 (percentage points) or "
                "perplexity=2 (per cent)"
            )
        margins[metric.strip()] = margin
    return margins


def check(
    store: Store,
    baseline: Path,
    *,
    margins: Mapping[str, float] | None = None,
    inconclusive: Inconclusive = "fail",
) -> Verdict:
    """Hold a results folder to a baseline.

    Raises ResultsError where either cannot be read, nothing can be compared or the data differ,
    and RecipeError for a metric that no margin is given for.
    """
    old, new = read(baseline), read_results(store)
    margins = DEFAULT_MARGINS | AUDIT_MARGINS | dict(margins or {})
    gates = []
    for cell in old.cells:
        if cell in new.broken:
            gates.append(_whole(cell, new.broken[cell]))
        elif cell not in new.cells:
            gates.append(_whole(cell, "missing: not in the grid of these results"))
        elif not new.cells[cell].audited:
            gates.append(_whole(cell, "not audited: nothing shows that it was quantized"))
        else:
            lost = [n for n in old.cells[cell].scores if n not in new.cells[cell].scores]
            gates += [
                Gate(cell=cell, task=task, metric=metric, outcome="fail", reason="score is missing")
                for task, metric in lost
            ]
            gates += _audit_gates(cell, old.cells[cell], new.cells[cell], margins)
    blocked = {gate.cell for gate in gates if not gate.task}
    for line in compare_sets(old, new):
        if line.cell not in blocked:
            gates.append(_gate(line, margins))
    if not gates:
        raise ResultsError(f"{baseline}: has no cells; make it again")
    if not any(cell in new.cells or cell in new.broken for cell in old.cells):
        raise ResultsError(
            f"{store.directory} has no cell of {baseline}; check results of the same recipe"
        )
    known = old.cells.keys()
    extra = sorted((new.cells.keys() | new.broken.keys()) - known)
    return Verdict(
        results=str(store.directory),
        baseline=str(baseline),
        gates=tuple(gates),
        notes=tuple(f"{cell}: not in the baseline, so not gated" for cell in extra),
        inconclusive=inconclusive,
    )


def _audit_gates(
    cell: str, old: CellResults, new: CellResults, margins: Mapping[str, float]
) -> list[Gate]:
    """Weights no further from the original's, no more bits, no less of the model quantized."""
    gates = []
    for name, before in old.measures.items():
        after = new.measures.get(name)
        if after is None:
            gates.append(_whole(cell, f"the audit has no {name.replace('_', ' ')} any more"))
            continue
        rise = 100 * (after / before - 1) if before else 100 * float(after > 0)
        worse = -rise if name == "coverage" else rise
        passed = worse <= margins[name] + 1e-9
        told = f"{before:.4g} in the baseline, {after:.4g} now"
        gates.append(
            Gate(
                cell=cell,
                task=AUDIT,
                metric=name,
                outcome="pass" if passed else "fail",
                reason=f"{'within' if passed else 'beyond'} the margin: {told}",
                margin=margins[name],
                worse=Worsening(estimate=worse, low=worse, high=worse),
            )
        )
    return gates


def _whole(cell: str, reason: str) -> Gate:
    return Gate(cell=cell, task="", metric="", outcome="fail", reason=reason)


def _gate(line: Change, margins: Mapping[str, float]) -> Gate:
    place = {"cell": line.cell, "task": line.task, "metric": line.metric, "change": line}
    margin = _margin(line, margins)
    effect = line.effect
    if effect is None:
        return Gate(
            **place,
            margin=margin,
            outcome="inconclusive",
            reason=f"cannot be paired on {line.documents} documents",
        )
    worse = worsening(effect, higher_is_better=line.higher_is_better)
    if effect.kind == "log ratio":
        limit = math.log1p(margin / 100)
        shown = Worsening(**{k: 100 * math.expm1(v) for k, v in _parts(worse).items()})
    else:
        scale = 100 if line.percent else 1
        limit = margin / scale
        shown = Worsening(**{k: scale * v for k, v in _parts(worse).items()})
    needed = None
    if worse.high <= limit:
        outcome, reason = "pass", "within the margin"
    elif worse.low > limit:
        outcome, reason = "fail", "worse by more than the margin"
    else:
        outcome = "inconclusive"
        # The half-width of the bound as a standard error: it is one for Student's t, and stands
        # in for one where few answers changed.
        spread = max(effect.interval.stderr, (worse.high - worse.estimate) / 1.645)
        needed = documents_needed(abs(limit - worse.estimate), spread, line.documents)
        reason = (
            f"too few documents to tell: about {needed} would, at this difference"
            if needed
            else "exactly at the margin: no number of documents tells"
        )
    return Gate(**place, margin=margin, worse=shown, outcome=outcome, reason=reason, needed=needed)


def _parts(worse: Worsening) -> dict[str, float]:
    return {"estimate": worse.estimate, "low": worse.low, "high": worse.high}


def _margin(line: Change, margins: Mapping[str, float]) -> float:
    for name in (line.metric, line.base_metric):
        if name in margins:
            return margins[name]
    if line.percent:
        return margins["acc"]
    ratio = line.effect is not None and line.effect.kind == "log ratio"
    if ratio or line.base_metric.endswith("perplexity"):
        return margins["perplexity"]
    raise RecipeError(
        f"{line.task}: {line.metric} has no margin; give --margin {line.metric}=NUMBER "
        "(in the metric's own units)"
    )
