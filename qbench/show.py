"""One cell, or one results folder, as text for a terminal: all that its record holds. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from tabulate import tabulate

from qbench.comparison.explain import flat
from qbench.comparison.lines import judge
from qbench.errors import ResultsError
from qbench.record import Audit, Damage, Record, ScoringReport, Unavailable, Written
from qbench.runs import run_id, runs
from qbench.store import KEY_DIGITS, Store, read_grid
from qbench.text.numbers import NO_VALUE, metric_title, number, significant

WIDTH = 100  # of a line; what is longer goes on below its column


def folder_text(store: Store) -> str:
    """Which runs a results folder holds, and the cells of the one that is shown."""
    grid = store.grid()
    shown = run_id(grid)
    rows = []
    for name, path in runs(store.directory):
        one = read_grid(path)
        limit = "all documents" if one.limit is None else f"{one.limit} documents a task"
        made = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
        mark = "*" if name == shown else ""
        rows.append((mark, name, made, len(one.cells), ", ".join(one.tasks), limit))
    text = [f"{store.directory}: {grid.name}"]
    if rows:
        text += ["", _table(("", "run", "last begun", "cells", "tasks", "asked for"), rows)]
    cells = []
    for cell in grid.cells:
        record = store.get(cell)
        status, reason = judge(record)
        spent = sum(stage.seconds for stage in record.stages) if record else None
        took = NO_VALUE if spent is None else f"{spent:.1f} s"
        cells.append((cell.cell, status, cell.precision.name, cell.key[:KEY_DIGITS], took, reason))
    text += ["", _table(("cell", "status", "precision", "key", "took", ""), cells)]
    return "\n".join(text)


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
        ("Documents, by the digest of what was asked", _pairs(record.documents.items())),
        ("Environment", _environment(record)),
        (
            "Files",
            _pairs(
                (name, f"{f.bytes:,} bytes, SHA-256 {f.sha256}") for name, f in record.files.items()
            ),
        ),
        (f"Key {record.key}, of", _pairs(flat(record.key_parts))),
    ]
    return "\n\n".join(f"{title}\n{text}" if title else text for title, text in parts if text)


def document_text(store: Store, record: Record, document: int, task: str | None = None) -> str:
    """What was asked of one document, by its number: metrics, and the log-likelihood of every
    scored continuation; what the model wrote, where it generates.

    Raises ResultsError where no task, or not the one that is named, has such a document.
    """
    outcomes, responses = store.outcomes(record), store.responses(record)
    known = list(dict.fromkeys([*outcomes["task"], *responses["task"]]))
    wanted = known if task is None else [task]
    if task is not None and task not in known:
        raise ResultsError(f"{record.cell}: no task {task}; it has {', '.join(known)}")
    parts = []
    for name in wanted:
        of_it = outcomes[(outcomes["task"] == name) & (outcomes["document"] == document)]
        asked = responses[(responses["task"] == name) & (responses["document"] == document)]
        if of_it.empty and asked.empty:
            continue
        parts.append(f"{name}, document {document}")
        if not of_it.empty:
            metrics = [(metric_title(row.metric), f"{row.value:g}") for row in of_it.itertuples()]
            parts.append(_table(("metric", "value"), metrics))
        if not asked.empty:
            parts.append(_requests(asked["log_likelihood"].tolist(), asked["greedy"].tolist()))
    if not parts:
        last = int(outcomes["document"].max()) if len(outcomes) else -1
        raise ResultsError(f"{record.cell}: no document {document}; the last one is {last}")
    return "\n\n".join(parts)


def _requests(likelihoods: Sequence[float], greedy: Sequence[bool]) -> str:
    best = max(range(len(likelihoods)), key=likelihoods.__getitem__)
    rows = [
        (index, f"{value:.4f}", "yes" if by_itself else "", "likeliest" if index == best else "")
        for index, (value, by_itself) in enumerate(zip(likelihoods, greedy, strict=True))
    ]
    return _table(("request", "log-likelihood", "greedy", ""), rows)


def _head(record: Record) -> str:
    took = (record.finished - record.started).total_seconds()
    pairs = {
        "cell": record.cell,
        "status": record.status,
        "error": record.error or "",
        "method": f"{record.title}, {record.precision.name}",
        "attention": record.attention,
        "made": f"{record.started:%Y-%m-%d %H:%M:%S %Z}, in {took:.1f} s",
    }
    return _pairs((name, value) for name, value in pairs.items() if value)


def _scores(record: Record) -> str:
    rows = []
    for score in record.scores:
        percent = score.aggregation == "mean" and abs(score.value) <= 1
        stderr = NO_VALUE if score.stderr is None else number(score.stderr, percent=percent)
        value = number(score.value, percent=percent)
        rows.append((score.label, metric_title(score.metric), value, stderr, score.documents))
    return _table(("task", "metric", "value", "± SE", "documents"), rows)


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
    return _table(head, rows)


def _stages(record: Record) -> str:
    rows = [
        (stage.name, f"{stage.seconds:.1f} s", f"{stage.peak_memory_gib:.2f} GiB", stage.detail)
        for stage in record.stages
    ]
    return _table(("stage", "took", "memory", ""), rows)


def _scoring(report: ScoringReport | None) -> str:
    return _part(report)


def _audit(audit: Audit | None) -> str:
    if audit is None:
        return ""
    said = audit.model_dump(exclude_none=True, mode="json", exclude={"modules"})
    text = [_pairs(flat({name: value for name, value in said.items() if value not in ([], "")}))]
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
    return "\n\n".join([*text, *([_table(head, rows)] if rows else [])])


def _part(part: Written | None) -> str:
    """All that a part of a record says; nothing where there is none."""
    said = part.model_dump(exclude_none=True, mode="json") if part is not None else {}
    return _pairs(flat(said)) if said else ""


def _environment(record: Record) -> str:
    return _part(record.environment)


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    known = list(pairs)
    width = max((len(name) for name, _ in known), default=0)
    lines: list[str] = []
    for name, value in known:
        pieces = list(_wrapped(value, max(20, WIDTH - width - 4))) or [""]
        lines.append(f"  {name.ljust(width)}  {pieces[0]}")
        lines += [f"  {'':{width}}  {piece}" for piece in pieces[1:]]
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> Iterator[str]:
    for start in range(0, len(text), width):
        yield text[start : start + width]


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    text = tabulate(rows, headers=head, tablefmt="plain", disable_numparse=True)
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())
