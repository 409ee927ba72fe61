"""One cell: all that its record holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qbench.comparison.explain import flat
from qbench.comparison.metrics import is_percentage
from qbench.records import Audit, Damage, Record, RecordModel, ScoringReport, Unavailable
from qbench.show.layout import pairs, table
from qbench.text import NO_VALUE, metric_title, number, significant

EMPTY: tuple[object, ...] = ([], {}, "")


def cell_text(record: Record) -> str:
    """Everything that a record says."""
    parts: list[tuple[str, str]] = [
        ("", _head(record)),
        ("Scores", _scores(record)),
        ("Damage, against the unquantized cell", _damage(record.damage)),
        ("Stages", _stages(record)),
        ("Scoring", _scoring(record.scoring)),
        ("Audit", _audit(record.audit)),
        ("Training", _part(record.training)),
        ("Documents, by the digest of what was asked", pairs(record.documents.items())),
        ("Environment", _environment(record)),
        (
            "Files",
            pairs(
                (name, f"{f.bytes:,} bytes, SHA-256 {f.sha256}") for name, f in record.files.items()
            ),
        ),
        (f"Key {record.key}, of", pairs(flat(record.key_parts))),
    ]
    return "\n\n".join(f"{title}\n{text}" if title else text for title, text in parts if text)


def took(record: Record) -> str:
    """From a cell's start to its end, what lies between its stages included."""
    return f"{(record.finished - record.started).total_seconds():.1f} s"


def _head(record: Record) -> str:
    values = {
        "cell": record.cell,
        "status": record.status,
        "error": record.error or "",
        "method": f"{record.title}, {record.precision.name}",
        "attention": record.attention,
        "begun": f"{record.started:%Y-%m-%d %H:%M:%S %Z}",
        "took": took(record),
    }
    return pairs((name, value) for name, value in values.items() if value)


def _scores(record: Record) -> str:
    rows = []
    for score in record.scores:
        percent = is_percentage(score.metric)
        stderr = NO_VALUE if score.stderr is None else number(score.stderr, percent=percent)
        value = number(score.value, percent=percent)
        rows.append((score.label, metric_title(score.metric), value, stderr, score.documents))
    return table(("task", "metric", "value", "± SE", "documents"), rows)


def _damage(damage: Damage | Unavailable | None) -> str:
    if damage is None:
        return ""
    if isinstance(damage, Unavailable):
        return f"not to be had: {damage.reason}"
    rows = []
    for task, found in damage.tasks.items():
        spread, flips = found.distributions, found.flips.items()
        kl = [NO_VALUE] * 3
        if spread is not None:
            kl = [significant(spread.kl.mean), significant(spread.kl.p99)]
            kl.append(f"{spread.top1_agreement:.2%}")
        text = ", ".join(f"{m}: {f.right_to_wrong} / {f.wrong_to_right}" for m, f in flips)
        rows.append((task, *kl, text))
    head = ("task", "mean KL", "KL p99", "same top token", "right to wrong / wrong to right")
    return table(head, rows)


def _stages(record: Record) -> str:
    rows = [
        (stage.name, f"{stage.seconds:.1f} s", f"{stage.peak_memory_gib:.2f} GiB", stage.detail)
        for stage in record.stages
    ]
    return table(("stage", "took", "memory", ""), rows)


def _scoring(report: ScoringReport | None) -> str:
    return _part(report)


def _audit(audit: Audit | None) -> str:
    if audit is None:
        return ""
    said = audit.model_dump(exclude_none=True, mode="json", exclude={"modules"})
    text = [_said(said)]
    rows = [
        (
            m.name,
            m.kind,
            f"{m.bits_per_weight:.2f}",
            f"{m.weight_error:.4f}",
            m.levels,
            m.digest[:8],
        )
        for m in audit.modules
    ]
    head = ("layer", "class", "bits a weight", "weight error", "levels", "digest")
    return "\n\n".join([*text, *([table(head, rows)] if rows else [])])


def _part(part: RecordModel | None) -> str:
    """All that a part of a record says; nothing where there is none."""
    return _said(part.model_dump(exclude_none=True, mode="json")) if part is not None else ""


def _said(values: Mapping[str, Any]) -> str:
    """What is not empty; what was measured in few digits, which a key's parts are not."""
    return pairs(flat({name: _plain(one) for name, one in values.items() if one not in EMPTY}))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, bool):
        return "yes" if value else "no"
    return significant(value) if isinstance(value, float) else value


def _environment(record: Record) -> str:
    return _part(record.environment)
