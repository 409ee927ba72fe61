"""The report's tables as data: what each column is, and what it sorts by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qbench.comparison.lines import Comparison, Line, judge, redundant
from qbench.comparison.wording import (
    RATIO_NOTE,
    arrow,
    detectable_text,
    effect_text,
    interval_text,
)
from qbench.published import printed
from qbench.record import Damage, Record
from qbench.report.costs import STAGES, bits_per_weight, sound
from qbench.store import KEY_DIGITS
from qbench.tables.beside import find_printed
from qbench.tables.layout import delta_text, entry_text, noise_notes
from qbench.text.numbers import NO_VALUE, metric_title


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Text to show, and a number to sort by where the text is one."""

    text: str
    sort: float | None = None
    title: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataTable:
    """One sortable, filterable table. ``numeric`` says which columns hold numbers."""

    name: str
    section: str
    caption: str
    head: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[Cell, ...], ...]


def data_tables(comparison: Comparison, *, published: str | None = None) -> list[DataTable]:
    """All tables that have rows."""
    tables = [
        _scores(comparison, published),
        _damage(comparison),
        _divergence(comparison),
        _stages(comparison),
        _audit(comparison),
        _provenance(comparison),
    ]
    return [table for table in tables if table.rows]


def _table(
    name: str, section: str, caption: str, head: list[str], rows: list[list[Cell]]
) -> DataTable:
    """Columns in which no row has anything are left out."""
    kept = [place for place in range(len(head)) if any(row[place].text for row in rows)]
    return DataTable(
        name=name,
        section=section,
        caption=caption,
        head=tuple(head[place] for place in kept),
        numeric=tuple(any(row[place].sort is not None for row in rows) for place in kept),
        rows=tuple(tuple(row[place] for place in kept) for row in rows),
    )


def _shown(comparison: Comparison) -> Iterator[Line]:
    return (line for line in comparison.lines if not redundant(line, comparison.lines))


def _names(line: Line) -> list[Cell]:
    bits = "" if line.bits is None else f"{line.bits:g}"
    return [
        Cell(text=line.label),
        Cell(text=f"{metric_title(line.metric)} {arrow(line)}"),
        Cell(text=line.quantizer),
        Cell(text=bits, sort=line.bits),
    ]


NAMES = ["Task", "Metric", "Quantization", "Bits"]


def _scores(comparison: Comparison, published: str | None) -> DataTable:
    paper = printed(published) if published else {}
    head = [*NAMES, *comparison.checkpoints]
    for other in comparison.others:
        head += [f"Δ {other}", "95 % interval", "p (Holm)"]
    head += [f"Δ printed ({published})"] if paper else []
    head.append("Documents")
    rows = []
    for line in _shown(comparison):
        row = _names(line)
        for entry in line.entries:
            title = entry.reason or f"record {entry.key[:KEY_DIGITS]}"
            row.append(Cell(text=entry_text(entry, line), sort=entry.value, title=title))
        for other in comparison.others:
            delta, effect = line.delta(other), line.deltas.get(other)
            row += [
                Cell(text=delta_text(comparison, line, other), sort=delta),
                Cell(text=interval_text(effect, percent=line.percent)),
                _p(effect.p_holm if effect else None),
            ]
        if paper:
            found = find_printed(line, paper)
            delta = found.delta if found else None
            row.append(
                Cell(
                    text=NO_VALUE if delta is None else f"{delta:+}",
                    sort=None if delta is None else float(delta),
                    title=found.source if found else "",
                )
            )
        documents = [e.documents for e in line.entries if e.documents is not None]
        row.append(Cell(text=str(min(documents, default=NO_VALUE)), sort=min(documents, default=0)))
        rows.append(row)
    told = ["Scores and Δ; ‡ significant after Holm, † after Benjamini–Hochberg only."]
    caption = " ".join(told + noise_notes(comparison))
    return _table("scores", "scores", caption, head, rows)


def _damage(comparison: Comparison) -> DataTable:
    head = list(NAMES)
    for checkpoint in comparison.checkpoints:
        head += [f"Damage {checkpoint}", "95 % interval"]
    for other in comparison.others:
        head += [f"Difference {other}", "95 % interval", "p (Holm)"]
    head.append("Detectable")
    rows = []
    for line in _shown(comparison):
        if not line.damages:
            continue
        row = _names(line)
        for checkpoint in comparison.checkpoints:
            row += _effect_cells(line, line.damages.get(checkpoint))
        for other in comparison.others:
            effect = line.differences.get(other)
            row += [*_effect_cells(line, effect), _p(effect.p_holm if effect else None)]
        asked = [*line.differences.values(), *line.damages.values()]
        row.append(
            Cell(
                text=detectable_text(asked[0], percent=line.percent),
                sort=asked[0].detectable,
            )
        )
        rows.append(row)
    caption = (
        "Damage (quantized minus unquantized) and difference-in-differences. Accuracies in points. "
        f"{RATIO_NOTE} Detectable: the smallest difference of damages that as many documents show "
        "with 80 % power"
    )
    return _table("damage", "damage", caption, head, rows)


def _effect_cells(line: Line, effect: object) -> list[Cell]:
    if effect is None:
        return [Cell(text=NO_VALUE), Cell(text=NO_VALUE)]
    return [
        Cell(text=effect_text(effect, percent=line.percent), sort=effect.estimate),
        Cell(text=interval_text(effect, percent=line.percent)),
    ]


def _p(value: float | None) -> Cell:
    if value is None:
        return Cell(text=NO_VALUE)
    return Cell(text="< 0.0001" if value < 1e-4 else f"{value:.4f}", sort=value)


def _divergence(comparison: Comparison) -> DataTable:
    head = ["Cell", "Task", "Tokens", "Mean KL", "KL p99", "Same top token", "Right to wrong",
            "Wrong to right", "Right answer, nats"]  # fmt: skip
    rows = []
    for record in sound(comparison):
        if not isinstance(record.damage, Damage):
            continue
        for task, part in record.damage.tasks.items():
            told = part.distributions
            flips = next(iter(part.flips.values()), None)
            rows.append(
                [
                    Cell(text=record.cell),
                    Cell(text=task),
                    _plain(told and told.tokens, "{:d}"),
                    _plain(told and told.kl.mean, "{:.4g}"),
                    _plain(told and told.kl.p99, "{:.4g}"),
                    _plain(told and told.top1_agreement, "{:.1%}"),
                    _plain(flips and flips.right_to_wrong, "{:d}"),
                    _plain(flips and flips.wrong_to_right, "{:d}"),
                    _plain(part.correct_answer and part.correct_answer.value, "{:+.4f}"),
                ]
            )
    caption = "What quantization changed in the distributions (nats a token) and in the answers"
    return _table("divergence", "distributions", caption, head, rows)


def _stages(comparison: Comparison) -> DataTable:
    head = [
        "Cell",
        *(f"{stage}, s" for stage in STAGES),
        "Together, s",
        "Peak memory, GiB",
        "Notes",
    ]
    rows = []
    for record in comparison.records.values():
        if not record.stages:
            continue
        seconds = {stage.name: stage.seconds for stage in record.stages}
        rows.append(
            [
                Cell(text=record.cell),
                *(_plain(seconds.get(stage), "{:.1f}") for stage in STAGES),
                _plain(sum(seconds.values()), "{:.1f}"),
                _plain(max(stage.peak_memory_gib for stage in record.stages), "{:.2f}"),
                Cell(text="; ".join(s.detail for s in record.stages if s.detail)),
            ]
        )
    return _table("stages", "costs", "Wall time by stage, and peak memory", head, rows)


def _audit(comparison: Comparison) -> DataTable:
    head = ["Cell", "Status", "Bits a weight", "Coverage", "Weight error", "Levels", "Logits moved",
            "Left out", "Why"]  # fmt: skip
    rows = []
    for place in comparison.grid.cells:
        record = comparison.records.get(place.cell)
        status, reason = judge(record)
        audit = record.audit if record else None
        if status == "ok" and audit is None and place.quantized:
            status, reason = "not audited", "nothing shows that it was quantized"
        rows.append(
            [
                Cell(text=place.cell),
                Cell(text=status),
                _plain(bits_per_weight(record) if record else None, "{:.2f}"),
                _plain(audit and audit.coverage, "{:.1%}"),
                _plain(audit and audit.weight_error, "{:.4f}"),
                _plain(audit and audit.levels, "{:d}"),
                _plain(audit and audit.logits_moved, "{:.3g}"),
                Cell(text=", ".join(audit.left_out) if audit else ""),
                Cell(text=reason),
            ]
        )
    return _table("audit", "audit", "Proof that each cell was quantized as it says", head, rows)


def _provenance(comparison: Comparison) -> DataTable:
    head = ["Cell", "Record", "Normalizer/kernel", "Hardware", "Versions", "Revision", "Finished"]
    rows = [
        [
            Cell(text=record.cell),
            Cell(text=record.key[:KEY_DIGITS], title=record.key),
            Cell(text=record.attention),
            Cell(text=f"{record.environment.hardware} ({record.environment.device})"),
            Cell(text=_versions(record)),
            Cell(text=(record.environment.git_revision or NO_VALUE)[:10]),
            Cell(text=f"{record.finished:%Y-%m-%d %H:%M}"),
        ]
        for record in comparison.records.values()
    ]
    return _table("provenance", "provenance", "Where every record comes from", head, rows)


def _versions(record: Record) -> str:
    found = {"python": record.environment.python, "qbench": record.environment.qbench}
    found |= record.environment.versions
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _plain(value: float | None, form: str) -> Cell:
    if value is None:
        return Cell(text=NO_VALUE)
    return Cell(text=form.format(value).replace("-", "−") if value < 0 else form.format(value),
                sort=float(value))  # fmt: skip
