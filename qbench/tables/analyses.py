"""Render the results of `qbench analyze`: the softpick paper's table 4, and one CSV of all numbers.

The viewer's page *Why* shows the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from qbench.errors import ResultsError
from qbench.records import Analysis, Damage, Measured, Record, Sensitivity
from qbench.store import Analyses, Sensitivities, Store
from qbench.text import (
    NO_VALUE,
    Table,
    as_csv,
    for_markdown,
    from_rows,
    group_by_reason,
    number,
    significant,
)
from qbench.text import markdown as table_markdown


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalysisResults:
    """Hold the analyses of a results folder and the records beside them. ``cells``: analyses with
    measurements; ``records``: valid ones of `qbench run`; ``problems``: a line per missing or
    failed analysis; ``replicates``: group → its trainings."""

    cells: tuple[Analysis, ...]
    sensitivities: tuple[Sensitivity, ...]
    records: tuple[Record, ...]
    problems: tuple[str, ...]
    replicates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def load_analyses(store: Store) -> AnalysisResults:
    """Read all analyses of a results folder, and the records of its last run; if one of these is
    damaged, none is kept, and a problem says so. Raises ResultsError if an analysis is damaged."""
    analyses: Analyses[Analysis] = Analyses(store.directory)
    cells, units = analyses.records(), Sensitivities(store.directory).records()
    failed = [each for each in (*cells, *units) if each.status == "failed"]
    problems = group_by_reason((each.cell, f"failed: {each.error}") for each in failed)
    records: list[Record] = []
    replicates = analyses.manifest().replicates if analyses.has_manifest() else {}
    if store.has_manifest():
        replicates = replicates or store.manifest().replicates
        try:
            records = [each for each in store.records() if each.status == "ok"]
        except ResultsError as error:
            problems.append(f"Damage is left out: {error}")
    return AnalysisResults(
        cells=tuple(each for each in cells if each.measured is not None),
        sensitivities=tuple(each for each in units if each.status == "ok"),
        records=tuple(records),
        problems=tuple(problems),
        replicates=replicates,
    )


# --- the paper's table 4

NOTES = (
    "Sink rate: share of heads, over texts, whose mean weight on the first key exceeds ε.",
    "Kurtosis of all hidden states at once. Sparsity: exact zeros in the lower triangle.",
)
KL_NOTE = (
    "KL: divergence of the quantized model of the same weights from the unquantized one, nats per "
    "token, mean over all scored tokens of all tasks."
)
SEEDS_NOTE = "Trainings of one kind: their mean, in brackets the lowest and the highest."


def table_4(results: AnalysisResults) -> list[Table]:
    """Return the paper's table 4: a row per analyzed cell and per group of analyzed trainings, with
    the KL divergence of each quantized cell of the same weights; [] without cells."""
    cells = {each.cell: [each] for each in results.cells}
    groups = {
        f"{group}/{quantizer}, {len(members)} trainings": [
            cells[f"{member}/{quantizer}"][0] for member in members
        ]
        for group, members in results.replicates.items()
        for quantizer in dict.fromkeys(each.quantizer for each in results.cells)
        if all(f"{member}/{quantizer}" in cells for member in members)
    }
    kl_of = {each.cell: _kl_by_quantizer(each, results) for each in results.cells}
    labels = dict.fromkeys(label for by_quantizer in kl_of.values() for label in by_quantizer)
    rows = []
    for name, analyses in (groups | cells).items():
        measured = [_measures(each.measured) for each in analyses]
        row = {
            head: _spread([each[head] for each in measured], partial(number, percent="%" in head))
            for head in measured[0]
        }
        for label in labels:
            values = [kl_of[each.cell].get(label) for each in analyses]
            row[f"KL {label}"] = _spread(values, significant)
        rows.append({"Cell": name, **row})
    notes = [*NOTES, *([KL_NOTE] if labels else []), *([SEEDS_NOTE] if groups else [])]
    title = "Sinks, hidden states, sparsity: the softpick paper's table 4"
    return from_rows(rows, title=title, notes=notes)


def _measures(measured: Measured) -> dict[str, float | None]:
    """Return the values of table 4's columns for one analysis, by their heads."""
    rates, hidden = measured.sinks[0].rates, measured.hidden
    return {
        "Sink rate %, ε 0.2": rates["0.2"],
        "Sink rate %, ε 0.3": rates["0.3"],
        "Kurtosis": hidden.kurtosis,
        "Min": hidden.minimum,
        "Max": hidden.maximum,
        "Sparsity %": measured.zeros,
    }


def _kl_by_quantizer(analysis: Analysis, results: AnalysisResults) -> dict[str, float]:
    """Return quantizer → KL divergence of the quantized records with the same original weights as
    ``analysis``; empty if ``analysis`` is of a quantized cell."""
    if analysis.precision.quantized:
        return {}
    kl_of = {
        record.quantizer: mean_kl(record)
        for record in results.records
        if record.quantized
        and record.checkpoint == analysis.checkpoint
        and all(
            record.key_parts.get(part) == analysis.key_parts.get(part)
            for part in ("weights", "normalizer", "normalizer source")
        )
    }
    return {label: value for label, value in kl_of.items() if value is not None}


def mean_kl(record: Record) -> float | None:
    """Return the mean KL over all scored tokens, nats per token; None if it was not measured."""
    if not isinstance(record.damage, Damage):
        return None
    every = [task.distributions for task in record.damage.tasks.values() if task.distributions]
    tokens = sum(task.tokens for task in every)
    return sum(task.kl.mean * task.tokens for task in every) / tokens if tokens else None


def _spread(values: Sequence[float | None], text: Callable[[float], str]) -> str:
    """Return ``mean (lowest to highest)``; a single value as itself; a dash if any is missing."""
    measured = [value for value in values if value is not None]
    if len(measured) < len(values):
        return NO_VALUE
    if len(measured) == 1:
        return text(measured[0])
    return f"{text(sum(measured) / len(measured))} ({text(min(measured))} to {text(max(measured))})"


def texts_read(analyses: Sequence[Analysis]) -> list[str]:
    """Return a line per text: its length, device and attention, and the cells that read it."""
    lines = []
    for each in analyses:
        text = each.text
        bos = "BOS counted" if text.bos else "without BOS"
        line = f"{text.samples} texts of {text.length} tokens ({bos}) of {text.source}"
        if text.left_out:
            line += f"; {text.left_out} shorter one{'s' * (text.left_out > 1)} left out"
        lines.append((each.cell, f"{line}; {each.environment.device}, {each.attention}"))
    return group_by_reason(lines)


def markdown(results: AnalysisResults) -> str:
    """Return ``tables.md`` of the folder ``analysis``: the texts read, the paper's table 4 and the
    problems, without sensitivities (they are in ``analyses.csv``)."""
    tables = table_4(results)
    read = texts_read(results.cells)
    parts = ["# Analysis"]
    parts += ["\n".join(f"- {for_markdown(line)}" for line in read)] if read else []
    parts += [table_markdown(tables).rstrip()] if tables else []
    parts += [for_markdown(problem) for problem in results.problems]
    if not (read or tables or results.problems or results.sensitivities):
        parts.append("No cell was analyzed.")
    return "\n\n".join(parts) + "\n"


# --- all numbers as one CSV


def analyses_csv(results: AnalysisResults) -> str:
    """Return all numbers but attention maps in full precision as CSV, one per row; "" without any.
    Columns: ``analysis`` (text or sensitivity), ``checkpoint``, ``quantizer``, ``measure`` (the
    field of the record, dotted, list items by their index: layers and heads from 0; of a
    sensitivity after the unit's name), ``value``, and ``key`` of the record."""
    rows = []
    for each in (*results.cells, *results.sensitivities):
        about = {"analysis": "text", "checkpoint": each.checkpoint, "quantizer": each.quantizer}
        if isinstance(each, Sensitivity):
            about["analysis"] = "sensitivity"
            units = [*each.units, *([each.together] if each.together else [])]
            measured = {unit.name: unit.model_dump(exclude={"name"}) for unit in units}
        else:
            measured = each.measured.model_dump(exclude={"maps"})  # a number per weight
        rows += [
            {**about, "measure": name, "value": value, "key": each.key}
            for name, value in _numbers(measured)
        ]
    return as_csv(rows)


def _numbers(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted name, value) of every number and text in nested data; None is left out."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _numbers(part, f"{prefix}.{name}" if prefix else str(name))
    elif value is not None:
        yield prefix, value
