"""Compare results with a baseline: same checkpoint? layers quantized as well? scores in margins?

Results of another checkpoint are refused; other parts of the keys that differ are named.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from qbench.comparison.compare import Name
from qbench.comparison.rows import changed_files, key_differences
from qbench.errors import ResultsError, some
from qbench.gate.baseline import CellResults, read, read_results
from qbench.gate.verdict import (
    AUDIT,
    AUDIT_MARGINS,
    ROUNDING,
    GateResult,
    Inconclusive,
    Margin,
    Regression,
    Verdict,
    failure,
    margin_of,
    measured,
    require_known,
)
from qbench.metrics import is_percentage
from qbench.records import ANSWERS, Audit, ModuleAudit, Record
from qbench.statistics import (
    TESTABLE,
    Column,
    Effect,
    Missing,
    documents_needed,
    drawing_error,
    effects,
    samples_needed,
)
from qbench.statistics.effect import DRAWN_ERRORS
from qbench.statistics.panel import as_scored, on_shared_documents
from qbench.store import Store

# Parts of a cell's key that must be the baseline's, unless the user says otherwise.
ACROSS = {"weights": "other weights", "normalizer": "another attention normalizer"}
# Of the files that the part "weights" is the digest of.
AUDIT_MEASURES = ("weight_error", "bits_per_weight", "coverage")
# A key, which differs wherever anything does, and digests that "weights" has in one.
LEFT_OUT = ("damage against", "checkpoint")
SHORT = 12  # digits shown of a digest
CellScore = tuple[str, Name]


def require_same(
    old: Mapping[str, CellResults], new: Mapping[str, CellResults], across: Collection[str]
) -> list[str]:
    """Return a line for each part of the keys that differs, with its cells; cells that one side
    lacks and parts ``LEFT_OUT`` are not compared. Raises ResultsError if checkpoint or normalizer
    differ, unless ``across`` names that part."""
    changes: dict[tuple[str, str, str], list[str]] = {}
    cells = [cell for cell in old if cell in new]
    for cell in cells:
        parts = old[cell].record.key_parts, new[cell].record.key_parts
        for name, then, now in key_differences(*parts):
            part = name.split(".")[0]
            if part in LEFT_OUT:
                continue
            if part in ACROSS and part not in across:
                what = changed_files(*parts) if part == "weights" else ACROSS[part]
                raise ResultsError(
                    f"{cell}: these results are of {what} than the baseline ({_short(then)} → "
                    f"{_short(now)}); check results of the same checkpoint, or add --across {part} "
                    "if this is meant"
                )
            changes.setdefault((name, then, now), []).append(cell)
    return [
        f"{part}: {_short(a)} → {_short(b)} in "
        + (f"all {len(cells)} cells" if len(where) == len(cells) > 1 else some(where, 3))
        for (part, a, b), where in changes.items()
    ]


def _short(text: str) -> str:
    """Return a SHA-256 cut to its first digits; other text as it is."""
    digest = len(text) == 64 and all(digit in "0123456789abcdef" for digit in text)
    return f"{text[:SHORT]}…" if digest else text


def check(
    store: Store,
    baseline: Path,
    *,
    margins: Mapping[str, float] | None = None,
    inconclusive: Inconclusive = "fail",
    across: Collection[str] = (),
) -> Verdict:
    """Compare a results folder with a baseline and return the verdict.

    ``margins`` are the user's (``parse_margins``), ``across`` names parts of the keys that may
    differ (``ACROSS``), ``inconclusive`` is the verdict if there are too few documents to tell.
    Raises ResultsError if results or baseline cannot be read, have no cell in common, or differ in
    data, checkpoints or normalizers; RecipeError for unknown or missing margins.
    """
    old, new = read(baseline), read_results(store)
    given = dict(margins or {})
    if not any(cell in new.cells or cell in new.broken for cell in old.cells):
        raise ResultsError(
            f"{store.directory} has no cell of {baseline}; check results of the same recipe"
        )
    require_known(given, [score for each in old.cells.values() for score in each.scores.values()])
    both = [cell for cell in old.cells if cell in new.cells]
    for cell in both:
        require_same_data(cell, old.cells[cell].record, new.cells[cell].record)
    notes = require_same(old.cells, new.cells, across)
    allowed = AUDIT_MARGINS | given
    gates: list[GateResult] = []
    for cell, before in old.cells.items():
        after = new.cells.get(cell)
        if why := new.broken.get(cell) or _unusable(before.record, after and after.record):
            gates.append(failure(cell, why))
            continue
        for task, metric in before.scores:
            if (task, metric) not in after.scores:
                why = after.record.failed_tasks.get(task)
                reason = "score is missing" + (f": {why}" if why else "")
                gates.append(failure(cell, reason, task, metric))
        if before.record.quantized:
            audits = (before.record.audit, after.record.audit)
            gates += [*_audit_gates(cell, *audits, allowed), *layer_gates(cell, *audits, allowed)]
    blocked = {gate.cell for gate in gates if not gate.task}
    many = sum(len(scored.scores) for scored in old.cells.values())
    compared = changes(
        {cell: (old.cells[cell], new.cells[cell]) for cell in both if cell not in blocked}
    )
    for cell in both:
        before, after = old.cells[cell], new.cells[cell]
        for name in before.scores:
            if gate := compared.get((cell, name)):
                margin = margin_of(
                    before.scores[name], before.columns[name], given, lines=many,
                    variance=before.variances.get(name),
                )  # fmt: skip
                gates.append(judge(gate, margin, before.columns[name], after.columns[name]))
    extra = [cell for cell in (*new.cells, *new.broken) if cell not in old.cells]
    return Verdict(
        results=str(store.directory),
        baseline=str(baseline),
        gates=tuple(gates),
        notes=(*notes, *(f"{cell}: not in the baseline, so not gated" for cell in sorted(extra))),
        inconclusive=inconclusive,
        runs=(_run("results", new.cells), _run("baseline", old.cells)),
    )


def require_same_data(cell: str, before: Record, after: Record) -> None:
    """Raise ResultsError if the records ``before`` and ``after`` of ``cell`` scored different data,
    by their digests; tasks of one record alone are not compared."""
    for task, digest in before.documents.items():
        if after.documents.get(task, digest) != digest:
            raise ResultsError(
                f"{cell}: {task}: definition or data of this task differ between the two results, "
                "so documents cannot be paired; score both on the same data, or make a new baseline"
            )


def changes(cells: Mapping[str, tuple[CellResults, CellResults]]) -> dict[CellScore, GateResult]:
    """Return (cell, (task, metric)) → the change of each score that both sides have. ``cells``:
    cell → its results in the baseline and now. A change is over the documents that both scored, or
    of the recorded values if its metric has no test. All are inconclusive until ``judge`` decides.
    """
    by_name: dict[Name, dict[str, tuple[CellResults, CellResults]]] = defaultdict(dict)
    for cell, sides in cells.items():
        for name in sides[0].scores.keys() & sides[1].scores.keys():
            by_name[name][cell] = sides
    made: dict[CellScore, GateResult] = {}
    for name, both in by_name.items():
        columns = {(cell, i): side.columns[name]
                   for cell, pair in both.items() for i, side in enumerate(pair)}  # fmt: skip
        score = next(iter(both.values()))[0].scores[name]
        worse = -1 if score.higher_is_better else 1
        changed = {cell: {(cell, 1): worse, (cell, 0): -worse} for cell in both
                   if not _same(columns[cell, 0], columns[cell, 1])}  # fmt: skip
        made_of = effects(columns, [*changed.values()], score.aggregation)
        losses = dict(zip(changed, made_of, strict=True))
        for cell, sides in both.items():
            made[cell, name] = _compared(cell, name, *sides, losses.get(cell))
    return made


def _same(was: Column, now: Column) -> bool:
    """Return whether all documents of ``was`` have the same outcomes in ``now``."""
    if not np.array_equal(was.documents, now.documents):
        if not np.isin(was.documents, now.documents).all():
            return False
        now = now.only(was.documents)
    return np.array_equal(was.values, now.values) and np.array_equal(was.weights, now.weights)


def _compared(
    cell: str, name: Name, before: CellResults, after: CellResults, loss: Effect | Missing | None
) -> GateResult:
    """Return the change of one score, whose ``loss`` was computed on the documents of both sides;
    None if all outcomes are the same."""
    score, precision = before.scores[name], after.record.precision
    columns = [side.columns[name] for side in (before, after)]
    variances = [side.variances.get(name) for side in (before, after)]
    old, new = (side.scores[name].value for side in (before, after))
    documents = after.scores[name].documents
    shared = on_shared_documents(columns)
    if score.aggregation in TESTABLE and len(shared[0].documents):
        ratios = np.array([each.values.sum() / each.weights.sum() for each in shared])
        old, new = as_scored(ratios, score.aggregation).tolist()
        documents = len(shared[0].documents)
    if isinstance(loss, Effect) and any(variances):
        loss = replace(loss, drawn=drawing_error(columns, variances, score.aggregation))
    return GateResult(
        cell=cell, task=score.task, metric=score.metric, outcome="inconclusive", reason="",
        score=score, old=old, new=new, documents=documents,
        effect=loss,
        precision=precision.words if precision.in_parts else "",
    )  # fmt: skip


def _run(name: str, cells: Mapping[str, CellResults]) -> str:
    """Return one line about a run: models with sources, data, date and hardware."""
    records = [cell.record for cell in cells.values()]
    if not records:
        return f"{name}: no cell"
    models = [f"{r.checkpoint} ({r.source})" if r.source else r.checkpoint for r in records]
    data = [f"data: {record.data}" for record in records if record.data]
    hardware = [record.environment.hardware for record in records]
    date = f"{max(record.finished for record in records):%Y-%m-%d}"
    return f"{name}: {', '.join(dict.fromkeys((*models, *data, date, *hardware)))}"


def _unusable(old: Record, new: Record | None) -> str:
    """Return why the cell ``new`` cannot be compared with the baseline's ``old``; "" if it can."""
    if new is None:
        return "missing in these results"
    if old.quantized and not new.quantized:
        return "no longer quantized"
    return "" if new.audit else "not audited: nothing shows that it was quantized"


def _audit_gates(
    cell: str, old: Audit, new: Audit, margins: Mapping[str, float]
) -> list[GateResult]:
    """Compare the audit's measures of the whole cell with the baseline's: one result each."""
    gates, now = [], _measures(new)
    for name, before in _measures(old).items():
        after = now.get(name)
        if after is None:
            gates.append(failure(cell, f"the audit has no {name.replace('_', ' ')} any more"))
            continue
        rise = 100 * (after / before - 1) if before else 100 * float(after > 0)
        worse, margin = -rise if name == "coverage" else rise, margins[name]
        seen = f"{before:.4g} in the baseline, {after:.4g} now"
        gates.append(measured(cell, name, worse, margin, seen))
    return gates


def _measures(audit: Audit) -> dict[str, float]:
    """Return the audit's measures of the whole cell, by name: errors, bits, coverage."""
    measures = {name: getattr(audit, name) for name in AUDIT_MEASURES}
    if audit.activations is not None:
        measures["activation_error"] = audit.activations.error
    if audit.kv_cache is not None:
        measures["key_error"] = audit.kv_cache.key_error
        measures["value_error"] = audit.kv_cache.value_error
    return measures


SMALLEST = 1e-4  # an error below this is rounding; a rise is counted from this error
SAME = 1e-4  # relative difference up to which measures of the same codes agree
NAMED = 3  # layers named in a reason


def layer_gates(
    cell: str, before: Audit, after: Audit, margins: Mapping[str, float]
) -> list[GateResult]:
    """Compare error, gain, levels and bits of each layer of the audit ``after`` with ``before``.

    Returns one result per measure, with the worst layer; a single one if all layers have the same
    bits, or if some are no longer quantized; [] without layers. ``margins`` are in per cent, by
    ``layer_error`` and its like. A layer whose stored codes and measures are the same passes.
    Different codes are no failure in themselves: processors and library versions round differently.
    """
    old, new = ({layer.name: layer for layer in audit.modules} for audit in (before, after))
    if not old:
        return []
    lost = [name for name in old if name not in new]
    if lost:
        return [failure(cell, f"no longer quantized, or not audited: {some(lost, NAMED)}")]
    same = [name for name, layer in old.items() if _same_bits(layer, new[name])]
    if len(same) == len(old):
        reason = f"same bits in all {len(old)} layers"
        return [GateResult(cell=cell, task=AUDIT, metric="layers", outcome="pass", reason=reason)]
    same_bits = f"; same bits in {len(same)} of {len(old)} layers" if same else ""
    gates = []
    for metric, (measure, rise) in RISES.items():
        values = {name: (getattr(old[name], measure), getattr(new[name], measure)) for name in old}
        rises = {name: rise(*pair) for name, pair in values.items() if None not in pair}
        if rises:
            worst = max(rises, key=lambda name: rises[name])
            then, now = values[worst]
            seen = f"{worst} {then:.4g} in the baseline, {now:.4g} now{same_bits}"
            beyond = [name for name, value in rises.items() if value > margins[metric] + ROUNDING]
            ordered = sorted(beyond, key=lambda name: -rises[name])
            where = some(ordered, NAMED) if beyond else f"in all {len(rises)} layers"
            seen = f"{where}; worst: {seen}"
            gates.append(measured(cell, metric, rises[worst], margins[metric], seen))
    return gates


# By metric: the measure of a layer, and by how many per cent the new value is worse than the old.
RISES: dict[str, tuple[str, Callable[[float, float], float]]] = {
    "layer_error": ("weight_error", lambda old, new: 100 * (new - old) / max(old, SMALLEST)),
    "layer_gain": ("gain", lambda old, new: 100 * abs(new - old)),
    "layer_levels": ("levels", lambda old, new: 100 * (old - new) / max(old, 1)),
    "layer_bits": ("bits_per_weight", lambda old, new: 100 * (new - old) / old if old else 0.0),
}


def _same_bits(old: ModuleAudit, new: ModuleAudit) -> bool:
    """Return whether two audits of a layer have equal stored codes and measures."""
    pairs = ((getattr(old, name) or 0.0, getattr(new, name) or 0.0) for name, _ in RISES.values())
    close = all(math.isclose(*pair, rel_tol=SAME) for pair in pairs)
    return close and bool(old.digest) and old.digest == new.digest


def judge(gate: GateResult, margin: Margin, was: Column, now: Column) -> GateResult:
    """Test one score's change ``gate`` for a regression beyond its ``margin``, paired by document,
    and return it with the outcome and its reason. Without a test for its metric only values are
    compared. ``was``, ``now``: its outcomes. It fails if a document of the baseline is missing."""
    score, gone = gate.score, 0
    if not np.array_equal(was.documents, now.documents):
        gone = int((~np.isin(was.documents, now.documents)).sum())
    gate = replace(gate, margin=margin.value, given=margin.given)
    if score.aggregation not in TESTABLE:  # computed from all documents at once, such as BLEU
        worse = (100 if is_percentage(score.metric) else 1) * (gate.new - gate.old)
        worse = -worse if score.higher_is_better else worse
        by_value = measured(gate.cell, score.metric, worse, margin.value, "by its value alone")
        result = {name: getattr(by_value, name) for name in ("outcome", "reason", "worse")}
        gate, gone = replace(gate, **result), score.documents - gate.documents
    elif gate.effect is None:
        which = "the only document" if gate.documents == 1 else f"all {gate.documents} documents"
        none = Regression(0.0, 0.0, 0.0)
        return replace(gate, worse=none, outcome="pass", reason=f"same outcomes on {which}")
    else:
        gate = _tested(gate, margin)
    if gone <= 0:
        return gate
    missing = f"{gone} of the baseline's {score.documents} documents are missing"
    return replace(gate, outcome="fail", reason=f"{missing}; {gate.reason}")


def _tested(gate: GateResult, margin: Margin) -> GateResult:
    """Test one score for non-inferiority: pass if the one-sided bound of its regression is within
    the margin, fail if the other bound is beyond it, else inconclusive. For lengths of answers a
    change in either direction counts."""
    loss = gate.effect
    if isinstance(loss, Missing):
        if math.isfinite(gate.new):
            return replace(gate, reason=f"cannot be judged: {loss.reason}")
        return replace(gate, outcome="fail", reason="its score is not finite")
    worse = Regression(loss.estimate, *loss.bounds)
    if (gate.task, gate.metric) == (ANSWERS, "length") and worse.estimate < 0:
        worse = Regression(-worse.estimate, -worse.high, -worse.low)
    scale = 100 if is_percentage(gate.metric) else 1
    limit, shown = margin.value / scale, [scale * value for value in worse]
    if loss.kind == "log ratio":
        limit = math.log1p(margin.value / 100)
        with np.errstate(over="ignore"):  # beyond the largest double it is infinite
            shown = (100 * np.expm1(worse)).tolist()
    gate = replace(gate, worse=Regression(*shown))
    if worse.high <= limit:
        return replace(gate, outcome="pass", reason="within the margin")
    if worse.low > limit and worse.estimate > DRAWN_ERRORS * loss.drawn:
        return replace(gate, outcome="fail", reason="worse by more than the margin")
    # The half-width of the bound as a standard error: it is one for Student's t, and stands in for
    # one where few answers changed.
    spread = max(loss.stderr, (worse.high - worse.estimate) / 1.645)
    needed = documents_needed(abs(limit - worse.estimate), spread, gate.documents)
    reason = "exactly at the margin: no number of documents can tell"
    if needed:
        reason = f"too few documents to tell: about {needed} are needed at this difference"
        if more := samples_needed(abs(limit - worse.estimate), spread, loss.drawn):
            reason += f", or {more:.1f} times as many samples"
    if margin.given and margin.supported > 0:  # NaN is not
        reason += f"; {gate.documents} support a margin of {margin.supported:g}"
    return replace(gate, reason=reason)
