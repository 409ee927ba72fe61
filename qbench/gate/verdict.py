"""The gate's results and verdict as data, Markdown, JUnit XML and JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import isfinite
from typing import Literal
from xml.etree import ElementTree

from qbench.comparison.changes import Change
from qbench.statistics import Regression
from qbench.text import NO_VALUE, for_markdown, metric_title, number, table

ROUNDING = 1e-9  # per cent
Outcome = Literal["pass", "fail", "inconclusive"]
Inconclusive = Literal["pass", "fail"]
AUDIT = "audit"  # stands for the task in results about the audit


@dataclass(frozen=True, kw_only=True, slots=True)
class GateResult:
    """One comparison with the baseline. Without ``task`` the whole cell could not be compared."""

    cell: str
    task: str
    metric: str
    outcome: Outcome
    reason: str
    margin: float | None = None  # percentage points for accuracies, else per cent
    given: bool = False  # whether the user stated the margin
    worse: Regression | None = None  # in the margin's units
    change: Change | None = None

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.cell, self.task, self.metric) if part)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """All comparisons and the answer. ``exit_code``: 0 pass, 1 fail; unusable input raises (2)."""

    results: str
    baseline: str
    gates: tuple[GateResult, ...]
    notes: tuple[str, ...]
    inconclusive: Inconclusive  # what an inconclusive comparison counts as

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


def measured(cell: str, metric: str, rise: float, margin: float, seen: str) -> GateResult:
    """Return the result for a value that was measured, not sampled: it is worse by ``rise`` per
    cent; ``seen`` says both values in words."""
    within = rise <= margin + ROUNDING
    return GateResult(
        cell=cell,
        task=AUDIT,
        metric=metric,
        outcome="pass" if within else "fail",
        reason=f"{'within' if within else 'beyond'} the margin: {seen}",
        margin=margin,
        worse=Regression(estimate=rise, low=rise, high=rise),
    )


def failure(cell: str, reason: str, task: str = "", metric: str = "") -> GateResult:
    """Return a failure of a whole cell, or of one of its scores."""
    return GateResult(cell=cell, task=task, metric=metric, outcome="fail", reason=reason)


SIGNS = {"pass": "✓ pass", "fail": "✗ fail", "inconclusive": "? inconclusive"}

# What XML 1.0 cannot hold, escaped or not: most control characters, lone surrogates.
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

HEAD = ("Verdict", "Cell", "Task", "Metric", "Baseline", "Now", "Worse by", "at most", "Margin",
        "Documents", "Why")  # fmt: skip


def as_markdown(verdict: Verdict, passed: bool = True) -> str:
    """Return a summary for people: the verdict, then what did not pass, then the rest; without
    ``passed`` only what did not pass."""
    counts = ", ".join(
        f"{verdict.count(outcome)} {outcome}" for outcome in ("pass", "fail", "inconclusive")
    )
    order = {"fail": 0, "inconclusive": 1, "pass": 2}
    gates = sorted(verdict.gates, key=lambda gate: (order[gate.outcome], gate.task == AUDIT))
    rows = [_texts(gate) for gate in gates if passed or gate.outcome != "pass"]
    lines = [
        f"## qbench check: {verdict.outcome}",
        "",
        f"{for_markdown(verdict.results)} against {for_markdown(verdict.baseline)}: {counts}; "
        f"inconclusive counts as {verdict.inconclusive}, exit code {verdict.exit_code}.",
        "",
    ]
    if rows:
        lines += [
            table(HEAD, rows, align="llllrrrrrrl"),
            "",
            "- Worse by: in percentage points for accuracies, in per cent for perplexities, KL, "
            "lengths and the audit, else in the metric's own units; at most: its one-sided 95 % "
            "bound, paired by document.",
            "- Margin: * the smallest that the documents allow, since no margin was given.",
        ]
    lines += [f"- {for_markdown(note)}" for note in verdict.notes]
    return "\n".join(lines) + "\n"


def as_junit(verdict: Verdict) -> str:
    """Return JUnit XML with one test case per result; an inconclusive one is an error if it counts
    as failed, else skipped."""
    inconclusive = "error" if verdict.inconclusive == "fail" else "skipped"
    tags = {"fail": "failure", "inconclusive": inconclusive}
    suites = ElementTree.Element("testsuites")
    cases = ElementTree.SubElement(
        suites, "testsuite", name="qbench check", tests=str(len(verdict.gates))
    )
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        count = sum(tags.get(gate.outcome) == tag for gate in verdict.gates)
        cases.set(name, str(count))
    for gate in verdict.gates:
        case = ElementTree.SubElement(
            cases,
            "testcase",
            classname=_xml(f"qbench.{gate.cell}"),
            name=_xml(f"{gate.task} {gate.metric}".strip() or "cell"),
        )
        if gate.outcome in tags:
            element = ElementTree.SubElement(case, tags[gate.outcome], message=_xml(gate.reason))
            element.text = _xml(f"{_explain(gate)} ({gate.reason})")
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def as_json(verdict: Verdict) -> str:
    """Return all results as JSON; numbers that are not finite are text, as in records."""
    return json.dumps(
        {
            "outcome": verdict.outcome,
            "exit_code": verdict.exit_code,
            "inconclusive_counts_as": verdict.inconclusive,
            "results": verdict.results,
            "baseline": verdict.baseline,
            "notes": verdict.notes,
            "gates": [_plain(gate) for gate in verdict.gates],
        },
        indent=1,
        ensure_ascii=False,
    )


def _plain(gate: GateResult) -> dict[str, object]:
    change, worse = gate.change, gate.worse
    values = {
        "cell": gate.cell,
        "task": gate.task or None,
        "metric": gate.metric or None,
        "outcome": gate.outcome,
        "reason": gate.reason,
        "margin": gate.margin,
        "margin_given": gate.given,
        "worse": worse and worse.estimate,
        "worse_at_least": worse and worse.low,
        "worse_at_most": worse and worse.high,
        "documents": change and change.documents,
        "baseline_value": change and change.old,
        "value": change and change.new,
        "p": getattr(change.effect, "p", None) if change else None,
    }
    return {
        name: json.dumps(value) if isinstance(value, float) and not isfinite(value) else value
        for name, value in values.items()
    }


def _texts(gate: GateResult) -> list[str]:
    change, worse = gate.change, gate.worse
    return [
        SIGNS[gate.outcome],
        change.cell_text if change else gate.cell,
        change.label if change else gate.task or NO_VALUE,
        metric_title(gate.metric) if gate.metric else NO_VALUE,
        number(change.old, percent=change.percent) if change else NO_VALUE,
        number(change.new, percent=change.percent) if change else NO_VALUE,
        _signed(worse.estimate) if worse else NO_VALUE,
        _signed(worse.high) if worse else NO_VALUE,
        _margin(gate),
        str(change.documents) if change else NO_VALUE,
        gate.reason,
    ]


def _margin(gate: GateResult) -> str:
    if gate.margin is None:
        return NO_VALUE
    return f"{gate.margin:g}" + ("" if gate.given or not gate.change else "*")


def _xml(text: str) -> str:
    return NOT_XML.sub("", text)


def _explain(gate: GateResult) -> str:
    if gate.worse is None:
        return gate.name
    return (
        f"{gate.name}: worse by {_signed(gate.worse.estimate)}, at most "
        f"{_signed(gate.worse.high)}, margin {_margin(gate)}"
    )


def _signed(value: float) -> str:
    return number(value, percent=False, signed=True)
