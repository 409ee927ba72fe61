"""The gate's margins, and its results and verdict as data, Markdown and JUnit XML."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple
from xml.etree import ElementTree

import numpy as np
from scipy import special

from qbench.errors import RecipeError
from qbench.metrics import LOG_MEAN, LOG_SCALE, base_metric, is_percentage
from qbench.records import ANSWERS, Score
from qbench.statistics import Column, Effect, Missing, Panel, drawing_error, effect
from qbench.statistics.intervals import MOST_DOCUMENTS, degrees_of_freedom
from qbench.statistics.panel import score_error
from qbench.text import NO_VALUE, for_markdown, metric_title, number, table

ROUNDING = 1e-9  # per cent
Outcome = Literal["pass", "fail", "inconclusive"]
Inconclusive = Literal["pass", "fail"]
AUDIT = "audit"  # in place of the task in results about the audit


class Regression(NamedTuple):
    """How much worse a new score is, with one-sided 95 % bounds; negative is better."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GateResult:
    """Hold one comparison with the baseline. Without ``task``: the cell could not be compared.

    Of a ``score`` that both sides have: its values and ``documents``, on those that both scored;
    ``effect``, what the new result loses, positive is worse, None if all outcomes are the same;
    ``precision`` of a cell whose activations or KV cache are quantized: ``W4A8KV4``.
    """

    cell: str
    task: str
    metric: str
    outcome: Outcome
    reason: str
    margin: float | None = None  # percentage points for accuracies, else per cent
    given: bool = False  # whether the user stated the margin
    worse: Regression | None = None  # in the margin's units
    score: Score | None = None
    old: float | None = None
    new: float | None = None
    documents: int | None = None
    effect: Effect | Missing | None = None
    precision: str = ""

    @property
    def name(self) -> str:
        """Return cell, task and metric, those that are not empty."""
        return " ".join(part for part in (self.cell, self.task, self.metric) if part)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Hold all comparisons and the answer; ``exit_code`` is 0 for pass and 1 for fail."""

    results: str
    baseline: str
    gates: tuple[GateResult, ...]
    notes: tuple[str, ...]
    inconclusive: Inconclusive  # what an inconclusive comparison counts as
    runs: tuple[str, ...] = ()  # the models, data, date and hardware of either side, a line each

    @property
    def outcome(self) -> Outcome:
        """Return fail if any comparison fails, else inconclusive if any is that, else pass."""
        outcomes = {gate.outcome for gate in self.gates}
        if "fail" in outcomes:
            return "fail"
        return "inconclusive" if "inconclusive" in outcomes else "pass"

    @property
    def exit_code(self) -> int:
        """Return 0 if the outcome is a pass, or inconclusive and that counts as a pass; else 1."""
        counted = self.inconclusive if self.outcome == "inconclusive" else self.outcome
        return 0 if counted == "pass" else 1

    def count(self, outcome: Outcome) -> int:
        """Return how many comparisons have this outcome."""
        return sum(gate.outcome == outcome for gate in self.gates)


def measured(cell: str, metric: str, rise: float, margin: float, seen: str) -> GateResult:
    """Return the result of a measure of the audit, which has no sampling error: pass if its
    ``rise`` (per cent, positive is worse) is within ``margin``. ``seen``: both values in words."""
    within = rise <= margin + ROUNDING
    return GateResult(
        cell=cell,
        task=AUDIT,
        metric=metric,
        outcome="pass" if within else "fail",
        reason=f"{'within' if within else 'beyond'} the margin: {seen}",
        margin=margin,
        worse=Regression(rise, rise, rise),
    )


def failure(cell: str, reason: str, task: str = "", metric: str = "") -> GateResult:
    """Return a failed result with its ``reason``, for a score, or the whole cell without these."""
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
        *(f"- {for_markdown(run)}" for run in verdict.runs),
        *[""] * bool(verdict.runs),
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
    """Return JUnit XML as text, with one test case per result; an inconclusive one is an error if
    it counts as failed, else skipped."""
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


def _texts(gate: GateResult) -> list[str]:
    """Return the texts of a result's row, in the order of the table's columns."""
    percent = is_percentage(gate.metric)
    return [
        SIGNS[gate.outcome],
        f"{gate.cell} ({gate.precision})" if gate.precision else gate.cell,
        gate.score.label if gate.score else gate.task or NO_VALUE,
        metric_title(gate.metric) if gate.metric else NO_VALUE,
        number(gate.old, percent=percent),
        number(gate.new, percent=percent),
        _signed(gate.worse and gate.worse.estimate),
        _signed(gate.worse and gate.worse.high),
        _margin(gate),
        NO_VALUE if gate.documents is None else str(gate.documents),
        gate.reason,
    ]


def _margin(gate: GateResult) -> str:
    """Return the margin as text, with ``*`` if it is the default; a dash without a margin."""
    if gate.margin is None:
        return NO_VALUE
    return f"{gate.margin:g}" + ("" if gate.given or not gate.score else "*")


def _xml(text: str) -> str:
    """Return ``text`` without characters that XML forbids."""
    return NOT_XML.sub("", text)


def _explain(gate: GateResult) -> str:
    """Return a sentence on a result: how much worse, at most how much, and the margin."""
    if gate.worse is None:
        return gate.name
    return (
        f"{gate.name}: worse by {_signed(gate.worse.estimate)}, at most "
        f"{_signed(gate.worse.high)}, margin {_margin(gate)}"
    )


def _signed(value: float | None) -> str:
    return number(value, percent=False, signed=True)


# --- margins of the gate: those that the user gives, defaults, and what the documents support


# Percentage points for accuracies, per cent of the value for perplexities, the KL divergence along
# answers and their length.
LEAST = {"acc": 1.0, "perplexity": 2.0, "kl": 10.0, "length": 5.0}
# Per cent. Weights are measured, not sampled, so these see what scores cannot. With other threads
# or instructions of the processor GPTQ moves one layer's error by up to 1.3 %, its gain by 0.2 %
# and the model's error by 0.1 %; other methods move by less than 0.001 %. Scales 3 % too large are
# a gain of 3 %, at any number of bits.
AUDIT_MARGINS = {
    "weight_error": 5.0,
    "bits_per_weight": 1.0,
    "coverage": 0.0,
    "activation_error": 5.0,
    "key_error": 5.0,
    "value_error": 5.0,
    "layer_error": 10.0,
    "layer_gain": 1.0,
    "layer_levels": 25.0,
    "layer_bits": 1.0,
}
# What a harmless change does to scores, measured on 4-bit GPTQ of two small models with other
# threads and instructions of the processor: 0.5 to 3 % of the answers flip, and documents'
# log-likelihoods move by 7 to 15 % of their own standard deviation.
FLIPS = 0.03
MOVES = 0.15
# The same of answers: from the first token that rounding changes on they are others.
ANSWER_FLIPS = 0.1
ANSWER_MOVES = 0.5
# Both runs draw their answers (√2); intervals reach some 13 % farther than their standard errors.
BOTH_DRAWN = 1.6
LEVEL = 0.05  # one-sided, of the test
MISSED = 0.05  # share of harmless changes that do not pass on every line


@dataclass(frozen=True, kw_only=True, slots=True)
class Margin:
    """How much worse a score may be, in percentage points or per cent. ``supported`` is the
    smallest margin that the number of documents supports; ``given``: by the user."""

    value: float
    given: bool
    supported: float


def parse_margins(texts: Sequence[str]) -> dict[str, float]:
    """Return metric → margin of texts such as ``["acc=0.5", "word_perplexity=1"]``. ``acc`` and
    ``perplexity`` mean all accuracies and all perplexities that are not named, a metric's name for
    it with any of lm-eval's filters. Raises RecipeError for any other text, or a metric twice."""
    margins = {}
    for text in texts:
        metric, _, number = text.rpartition("=")
        try:
            margin = float(number.removesuffix("%"))
        except ValueError:
            margin = math.nan
        if not metric.strip() or not math.isfinite(margin) or margin < 0:
            raise RecipeError(
                f"--margin {text}: write METRIC=NUMBER, 0 or more, such as acc=0.5 (percentage "
                "points) or perplexity=2 (per cent)"
            )
        if metric.strip() in margins:
            raise RecipeError(f"--margin {text}: {metric.strip()} is given twice; leave one out")
        margins[metric.strip()] = margin
    return margins


def require_known(given: Mapping[str, float], scores: Collection[Score]) -> None:
    """Raise RecipeError if a margin is ``given`` for a metric that the baseline's ``scores`` do not
    have, or if a metric that is neither an accuracy nor a perplexity has no margin."""
    named = [name for score in scores for name in (score.metric, base_metric(score.metric))]
    possible = [*dict.fromkeys([*LEAST, *named]), *AUDIT_MARGINS]
    for name in given:
        if name not in possible:
            raise RecipeError(
                f"--margin {name}={given[name]:g}: the baseline has no {name}; possible: "
                f"{', '.join(possible)}"
            )

    need = dict.fromkeys(score.metric for score in scores if _family(score) is None)
    if lacking := [metric for metric in need if not {metric, base_metric(metric)} & given.keys()]:
        raise RecipeError(
            f"no margin by default: {', '.join(lacking)}; add "
            + " ".join(f'--margin "{metric}=NUMBER"' for metric in lacking)
            + " (in the metric's own units)"
        )


def margin_of(
    score: Score, column: Column, given: Mapping[str, float], *, lines: int,
    variance: Column | None = None,
) -> Margin:  # fmt: skip
    """Return the margin of one ``score`` of the baseline: the ``given`` one by its metric's name,
    with or without filter, or its family's (acc, perplexity), else the smallest that its documents
    support. ``column`` has its outcomes, ``variance`` those of each prompt's mean if answers are
    drawn, ``lines`` scores are compared together. Call ``require_known`` before."""
    family = _family(score)
    supported = math.nan
    if family is not None:
        drawn = drawing_error([column], [variance], score.aggregation)
        supported = max(LEAST[family], _supported(score, column, lines, drawn))
    for name in (score.metric, base_metric(score.metric), family):
        if name in given:
            return Margin(value=given[name], given=True, supported=supported)
    return Margin(value=supported, given=False, supported=supported)


def _family(score: Score) -> str | None:
    """Return ``acc`` or ``perplexity``, or the metric itself for logarithms of means; None if no
    default margin exists."""
    if is_percentage(score.metric):
        return "acc"
    if score.aggregation == LOG_MEAN:
        return score.metric
    return "perplexity" if score.aggregation in LOG_SCALE else None


def _supported(score: Score, column: Column, lines: int, drawn: float) -> float:
    """Return the smallest margin (percentage points or per cent, rounded up to a tenth) with which
    a harmless change passes on all ``lines`` scores with probability 1 − MISSED (Bonferroni).

    The test passes if its upper bound is within the margin, so this is a quantile of that bound's
    distribution under a change with mean 0. It depends on the baseline only. ``drawn``: the score's
    standard error from drawing answers, which the new run adds once more.
    """
    documents, missed = len(column.documents), MISSED / lines
    if documents < 2 or not math.isfinite(score.value):
        return 0.0
    if drawn and _family(score) == "acc":
        margin = float(special.ndtri((1 - LEVEL, 1 - missed)).sum()) * BOTH_DRAWN * drawn
    elif _family(score) == "acc":  # an answer that is partly right moves less than one that flips
        flips = ANSWER_FLIPS if score.task == ANSWERS else FLIPS
        margin = _bound_of_flips(documents, missed, flips)
    else:
        weights, level, freedom = column.weights, LEVEL, documents - 1
        stderr = score_error(column.values, weights, score.aggregation)
        # The bound of the bootstrap-t is the end of the two-sided interval.
        if np.ptp(weights) or documents <= MOST_DOCUMENTS:
            kurtosis = 3 * float(np.mean(weights**4) / np.mean(weights**2) ** 2)
            level, freedom = LEVEL / 2, float(degrees_of_freedom(weights, kurtosis)[0])
        reach = special.stdtrit(freedom, (1 - level, 1 - missed)).sum()
        moves = (ANSWER_MOVES if score.task == ANSWERS else MOVES) * stderr
        margin = math.expm1(float(reach) * max(moves, BOTH_DRAWN * drawn))
    return math.ceil(1000 * margin - 1e-9) / 10


@functools.cache
def _bound_of_flips(documents: int, missed: float, flips: float) -> float:
    """Return the one-sided bound on the loss, as a fraction, that is exceeded with probability
    ``missed`` when a share ``flips`` of the answers changes, lost and won at the same rate."""
    rate = flips * documents / 2  # of either, Poisson
    # Lost − won: Skellam's distribution (Johnson 1959), whose quantiles scipy.stats may not find.
    beyond = special.chndtr(2 * rate, 2 * np.arange(1, documents + 100), 2 * rate)
    loss = int(np.argmax(beyond <= missed))
    # The likeliest counts with that difference: lost · won = rate².
    won = round((math.hypot(loss, 2 * rate) - loss) / 2)
    values = np.zeros((documents, 2))
    values[: min(loss + won, documents), 0] = 1
    values[max(0, documents - won) :, 1] = 1
    panel = Panel(values=values, weights=np.ones_like(values), index={"old": 0, "new": 1})
    return effect(panel, {"old": 1, "new": -1}, "mean").bounds[1]
