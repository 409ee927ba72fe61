"""Render a comparison as CSV: one row per score, with the key of the record that it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from qbench.comparison.chance import kept
from qbench.comparison.rows import Comparison, Row, RowValue, bits_per_weight, gib
from qbench.comparison.verdict import margin_of
from qbench.records import GroupScore
from qbench.statistics import Missing, documents_for_margin
from qbench.tables.published import find_printed, standard_errors_away
from qbench.tables.table import as_csv

LINE = ("task", "label", "metric", "direction", "method")
PRECISION = ("precision", "activations", "arithmetic", "kv_cache")  # where these are parts
SCORE = ("status", "value", "stderr", "low", "high", "documents")
CONTRASTS = {"delta": "deltas", "damage": "damages", "did": "differences"}
PARTS = ("", "_stderr", "_low", "_high")  # empty for perplexities, but for ``delta``
LOG_PARTS = ("_log_ratio", "_log_ratio_stderr", "_log_ratio_low", "_log_ratio_high")
TESTS = ("_test", "_p", "_p_holm", "_family", "_detectable", "_documents")
EQUIVALENCE = ("damage_at_most", "damage_documents_needed", "kept", "at_chance")
PRINTED = ("printed", "printed_source", "standard_errors_away")
COLUMNS = (
    *(*LINE, "bits", *PRECISION, "quantizer", "checkpoint", *SCORE),
    *(contrast + part for contrast in CONTRASTS for part in (*PARTS, *LOG_PARTS, *TESTS)),
    *EQUIVALENCE,
    *("bits_per_weight", "gib", "kl_mean", "kl_p99", "top1_agreement"),
    *("right_to_wrong", "wrong_to_right"),
    *(*PRINTED, "key", "reason"),
)


def comparison_csv(comparison: Comparison, *, published: str | None = None) -> str:
    """All scores of the grid in full precision and the record's units, failed and missing too.

    ``did`` is the difference-in-differences. ``low`` and ``high`` of a perplexity are those of its
    logarithm, as perplexities. Of perplexities ``delta`` is the raw difference, a
    number alone; errors, intervals, damage and ``did`` are in the columns of the log ratio, and
    ``detectable`` is a log ratio too. Printed numbers are in the paper's units. Text that a
    spreadsheet would compute begins with an apostrophe.
    """
    left_out = [] if published else [*PRINTED]
    if not any(line.precision.in_parts for line in comparison.lines):
        left_out += PRECISION
    columns = [column for column in COLUMNS if column not in left_out]
    return as_csv(comparison_rows(comparison, published=published), columns)


def comparison_rows(
    comparison: Comparison, *, published: str | None = None
) -> list[dict[str, object]]:
    """Return the rows of ``comparison_csv``, by the names in ``COLUMNS``."""
    rows = []
    for line in comparison.lines:
        for entry in line.entries:
            row = _row(line, entry)
            name = (entry.checkpoint, line.task, line.metric)
            row |= {
                "kept": kept(comparison, line, entry.checkpoint) if line.quantized else None,
                "at_chance": name in comparison.at_chance or None,
            }
            if published:
                row |= _printed(comparison, line, entry, published)
            rows.append(row | _predictions(comparison, line, entry))
    return [*rows, *_groups(comparison)]


def _predictions(comparison: Comparison, line: Row, entry: RowValue) -> dict[str, object]:
    """Return the cell's size, and how far its predictions are from the unquantized model's."""
    record = comparison.records.get(entry.cell)
    if record is None:
        return {}
    row: dict[str, object] = {"bits_per_weight": bits_per_weight(record), "gib": gib(record)}
    damage = comparison.task_damage(entry.cell, line.task)
    if damage and (divergence := damage.distributions):
        row |= {"kl_mean": divergence.kl.mean, "kl_p99": divergence.kl.p99}
        row["top1_agreement"] = divergence.top1_agreement
    if damage and (flips := damage.flips.get(line.metric)):
        row |= {name: getattr(flips, name) for name in ("right_to_wrong", "wrong_to_right")}
    return row


def _groups(comparison: Comparison) -> Iterator[dict[str, object]]:
    """Yield the scores of groups of tasks that have no row of their own; ``task`` is the group."""
    for record in comparison.records.values():
        for group in record.other_groups:
            yield {
                "task": group.group,
                "label": group.label,
                "metric": group.metric,
                "direction": _direction(group),
                "method": record.method,
                "quantizer": record.quantizer,
                "checkpoint": record.checkpoint,
                "status": "ok",
                "value": group.value,
                "stderr": group.stderr,
                "documents": group.documents,
                "key": record.key,
            }


def _direction(row: Row | GroupScore) -> str:
    return "up" if row.higher_is_better else "down"


def _about(line: Row) -> dict[str, object]:
    names = ("task", "label", "metric", "method", "quantizer")
    return {name: getattr(line, name) for name in names} | {"direction": _direction(line)}


def _row(line: Row, entry: RowValue) -> dict[str, object]:
    interval = line.intervals.get(entry.checkpoint)
    activations, kv_cache = line.precision.activations, line.precision.kv_cache
    row: dict[str, object] = {
        **_about(line),
        **asdict(entry),
        "bits": line.bits,
        "precision": line.precision.name,
        "activations": activations and activations.scheme,
        "arithmetic": activations and ("simulated" if activations.simulated else "real"),
        "kv_cache": kv_cache and kv_cache.scheme,
    }
    if interval is not None:
        row |= {"low": interval.low, "high": interval.high}
        if entry.stderr is None:
            row["stderr"] = interval.stderr
    if entry is not line.entries[0]:
        row["delta"] = line.delta(entry.checkpoint)
    for prefix, contrast in CONTRASTS.items():
        effect = line.effect(contrast, entry.checkpoint)
        if isinstance(effect, Missing):
            parts = LOG_PARTS if effect.kind == "log ratio" else PARTS
            row |= {prefix + parts[0]: effect.estimate, f"{prefix}_test": effect.reason}
        elif effect is not None:
            parts = LOG_PARTS if effect.kind == "log ratio" else PARTS
            ends = effect.interval
            values = (ends.estimate, ends.stderr, ends.low, ends.high)
            row |= {prefix + part: value for part, value in zip(parts, values, strict=True)}
            row |= {prefix + test: getattr(effect, test[1:]) for test in TESTS}
            if contrast == "damages":
                row |= {
                    "damage_at_most": effect.bounds[1],
                    "damage_documents_needed": documents_for_margin(effect, margin_of(line)),
                }
    return row


def _printed(comparison: Comparison, line: Row, entry: RowValue, name: str) -> dict[str, object]:
    row = find_printed(comparison, line, entry.checkpoint, name)
    if row is None:
        return {}
    away = standard_errors_away(line, entry.checkpoint, float(row["value"]))
    return {
        "printed": row["value"],
        "printed_source": row["table"],
        "standard_errors_away": away,
    }


EFFECT = ("p", "p_holm", "family", "detectable", "of_seeds", "seeds", "documents")
SEED_COLUMNS = (
    *("task", "label", "metric", "direction", "quantizer", "method", "group", "question", "kind"),
    *("estimate", "stderr", "low", "high", *EFFECT, "each"),
)


def seeds_csv(comparison: Comparison) -> str:
    """Return the effects over seeds, one per row.

    ``kind`` says what the numbers are: a difference in the score's units, or a log ratio, of a
    score the logarithm itself. ``of_seeds``: share of the variance that comes from the seeds.
    """
    rows = [
        {
            **_about(line),
            "group": group,
            "question": contrast,
            "kind": effect.kind,
            **asdict(effect.interval),
            **{name: getattr(effect, name) for name in EFFECT},
            "each": " ".join(map(repr, effect.each)),
        }
        for line in comparison.seeds
        for contrast, effects in (("score", "scores"), *CONTRASTS.items())
        for group, effect in getattr(line, effects).items()
    ]
    return as_csv(rows, SEED_COLUMNS, numbers=("each",))
