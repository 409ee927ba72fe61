"""What results hold, as text for a terminal: a folder, a cell, a document. Imports no torch."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import pandas as pd
from tabulate import tabulate

from qbench.comparison.explain import flat
from qbench.comparison.lines import status_of
from qbench.errors import ResultsError
from qbench.metrics import LOG_SCALE, is_percentage
from qbench.record_file import read
from qbench.records import (
    KEY_DIGITS,
    Audit,
    Damage,
    Record,
    RecordModel,
    RunManifest,
    Unavailable,
)
from qbench.store import Store, run_id, runs
from qbench.text import NO_VALUE, metric_title, number, significant

WIDTH = 100  # of a line; what is longer goes on below its column


def pairs(found: Iterable[tuple[str, str]]) -> str:
    known = list(found)
    width = max((len(name) for name, _ in known), default=0)
    room = max(20, WIDTH - width - 4)
    lines: list[str] = []
    for name, value in known:
        for index, text in enumerate(textwrap.wrap(value, room, break_on_hyphens=False) or [""]):
            lines.append(f"  {'' if index else name:{width}}  {text}")
    return "\n".join(lines)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    text = tabulate(rows, headers=head, tablefmt="plain", disable_numparse=True)
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


EMPTY: tuple[object, ...] = ([], {}, "")


def cell_text(record: Record) -> str:
    """Everything that a record says."""
    parts: list[tuple[str, str]] = [
        ("", _head(record)),
        ("Scores", _scores(record)),
        ("Tasks that could not be scored", pairs(record.failed_tasks.items())),
        ("Damage, against the unquantized cell", _damage(record.damage)),
        ("Stages", _stages(record)),
        ("Scoring", _part(record.scoring)),
        ("Audit", _audit(record.audit)),
        ("Training", _part(record.training)),
        ("Documents, by the digest of what was asked", pairs(record.documents.items())),
        ("Environment", _part(record.environment)),
        ("Files", _files(record)),
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
    for score in (*record.scores, *record.groups):
        percent = is_percentage(score.metric)
        stderr = NO_VALUE if score.stderr is None else number(score.stderr, percent=percent)
        value = number(score.value, percent=percent)
        rows.append((score.label, metric_title(score.metric), value, stderr, score.documents))
    return table(("task", "metric", "value", "± SE", "documents"), rows)


def _damage(damage: Damage | Unavailable | None) -> str:
    if damage is None:
        return ""
    if isinstance(damage, Unavailable):
        return f"not available: {damage.reason}"
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
    return table(head, rows) + _answers(damage) + _by_confidence(damage)


def _answers(damage: Damage) -> str:
    """Generated answers beside those of the unquantized cell."""
    rows = [
        (task, f"{said.identical} of {said.agreed.documents}", f"{said.agreed.value:.1%}")
        for task, found in damage.tasks.items()
        if (said := found.answers) is not None and said.agreed.value is not None
    ]
    head = ("task", "same answer", "up to the first difference")
    return "\n\n" + table(head, rows) if rows else ""


def _by_confidence(damage: Damage) -> str:
    """Mean KL, and how many tokens, by what the unquantized model gives its likeliest token."""
    found = {
        task: one.distributions.by_confidence
        for task, one in damage.tasks.items()
        if one.distributions and one.distributions.by_confidence
    }
    if not found:
        return ""
    rows = [
        (task, *(NO_VALUE if b.kl is None else f"{significant(b.kl)} ({b.tokens})" for b in bins))
        for task, bins in found.items()
    ]
    head = ("task", *(f"{one.low:g} to {one.high:g}" for one in next(iter(found.values()))))
    return "\n\nmean KL (tokens) by the unquantized model's confidence\n\n" + table(head, rows)


def _stages(record: Record) -> str:
    rows = [
        (stage.name, f"{stage.seconds:.1f} s", f"{stage.peak_memory_gib:.2f} GiB", stage.detail)
        for stage in record.stages
    ]
    return table(("stage", "took", "memory", ""), rows)


def _files(record: Record) -> str:
    found = record.files.items()
    return pairs((name, f"{file.bytes:,} bytes, SHA-256 {file.sha256}") for name, file in found)


def _audit(audit: Audit | None) -> str:
    if audit is None:
        return ""
    rows = [
        (one.name, one.kind, f"{one.bits_per_weight:.2f}", f"{one.weight_error:.4f}", one.levels,
         one.digest[:8])
        for one in audit.modules
    ]  # fmt: skip
    head = ("layer", "class", "bits a weight", "weight error", "levels", "digest")
    text = _said(audit.model_dump(exclude_none=True, mode="json", exclude={"modules"}))
    return "\n\n".join([text, *([table(head, rows)] if rows else [])])


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


def document_text(
    store: Store,
    record: Record,
    document: int,
    task: str | None = None,
    asked: Mapping[str, Sequence[Sequence[str]]] | None = None,
) -> str:
    """Of one document, by its number: metrics, and the log-likelihood of every scored
    continuation, or what the model wrote; each beside the unquantized cell's. ``asked``: by task,
    the texts of each request, which records do not keep.

    Raises ResultsError where no task, or not the one that is named, has such a document.
    """
    base = unquantized(store, record)
    cells = [record] if base is None else [record, base]
    outcomes = {one.cell: store.outcomes(one) for one in cells}
    responses = {one.cell: store.responses(one) for one in cells}
    own, written = outcomes[record.cell], responses[record.cell]
    known = list(dict.fromkeys([*own["task"], *written["task"]]))
    if task is not None and task not in known:
        raise ResultsError(f"{record.cell}: no task {task}; it has {', '.join(known)}")
    summed = {
        one.metric for one in record.scores if one.aggregation in (*LOG_SCALE, "bits_per_byte")
    }
    parts = []
    for name in known if task is None else [task]:
        scored, answered = (
            {cell: of[(of.task == name) & (of.document == document)] for cell, of in one.items()}
            for one in (outcomes, responses)
        )
        if scored[record.cell].empty and answered[record.cell].empty:
            continue
        parts.append(f"{name}, document {document}")
        parts += _asked((asked or {}).get(name, ()))
        texts = {cell: of[of["answer"].notna()] for cell, of in answered.items()}
        likelihoods = {cell: of[of["answer"].isna()] for cell, of in answered.items()}
        parts += filter(None, (_metrics(scored, summed), _requests(likelihoods)))
        parts += [_written(cell, of) for cell, of in texts.items() if len(of)]
    if parts and record.quantized and base is None:
        parts.append("(no finished record of the unquantized cell for these documents)")
    if not parts:
        last = int(own["document"].max()) if len(own) else -1
        raise ResultsError(f"{record.cell}: no document {document}; the last one is {last}")
    return "\n\n".join(parts)


def _asked(requests: Sequence[Sequence[str]]) -> list[str]:
    """Each request's texts; a context that all of them share stands once."""
    shared = {texts[0] for texts in requests} if len(requests) > 1 else set()
    parts = [f"asked\n{_indented(*shared)}"] if len(shared) == 1 else []
    for index, texts in enumerate(requests):
        own = texts[1:] if parts and len(shared) == 1 else texts
        if own:
            lines = "\n".join(_indented(text) for text in own)
            parts.append(f"request {index}\n{lines}")
    return parts


def unquantized(store: Store, record: Record) -> Record | None:
    """The good record of the unquantized cell that a quantized one is measured against; None for
    one that is unquantized, or where there is none."""
    if not record.quantized:
        return None
    key = record.key_parts.get("damage against")
    with suppress(ResultsError):  # a record's file alone, without its folder
        for cell in store.manifest().cells:
            theirs = cell.checkpoint == record.checkpoint and not cell.quantized
            if theirs and key in (None, cell.key):
                found = store.get_valid(cell)
                if found and found.status == "ok" and found.documents == record.documents:
                    return found
    return None


def _metrics(scored: Mapping[str, pd.DataFrame], summed: Collection[str]) -> str:
    """Of those that are ``summed`` a document has a log-likelihood, which is no perplexity."""
    own, *_ = columns = [one.set_index("metric")["value"] for one in scored.values()]
    rows = [
        (
            metric_title(metric) + (": log-likelihood" if metric in summed else ""),
            *(f"{of[metric]:g}" if metric in of else NO_VALUE for of in columns),
        )
        for metric in own.index
    ]
    return table(("metric", *scored), rows)


def _requests(asked: Mapping[str, pd.DataFrame]) -> str:
    """Log-likelihoods of each request, which one is the likeliest, and what is greedy."""
    own, *_ = frames = [one.set_index("request") for one in asked.values()]
    columns = [of["log_likelihood"] for of in frames]
    best = [of.idxmax() if len(of) > 1 else None for of in columns]
    rows = []
    for request in own.index:
        cells = [
            f"{of[request]:.4f}" + " likeliest" * (request == chosen) if request in of else NO_VALUE
            for of, chosen in zip(columns, best, strict=True)
        ]
        rows.append((request, *cells, "yes" if own["greedy"][request] else ""))
    return table(("log-likelihood of request", *asked, "greedy"), rows)


def _written(cell: str, texts: pd.DataFrame) -> str:
    """What the model wrote, and what the filters took from it that is not all of it."""
    parts = []
    answers = texts["filter"].isna().sum()
    for row in texts.itertuples():
        what = f"{cell} wrote" if pd.isna(row.filter) else f"{row.filter} took"
        if answers > 1:
            what += f" (answer {row.request})"
        more = f"\n  … {row.cut:,} more characters" if row.cut else ""
        parts.append(f"{what}\n" + _indented(row.answer) + more)
    return "\n\n".join(parts)


def _indented(text: str) -> str:
    """As it stands, line by line; what a terminal would obey is escaped."""
    lines = text.split("\n") if text else ["(nothing)"]
    return "\n".join(
        "  | " + "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in line)
        for line in lines
    )


def folder_text(store: Store) -> str:
    """Which runs a results folder holds, and the cells of the one that is shown."""
    grid = store.manifest()
    shown = run_id(grid)
    rows = []
    for name, path in runs(store.directory):
        one = read(path, RunManifest)
        limit = "all documents" if one.limit is None else f"{one.limit} documents a task"
        made = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
        mark = "*" if name == shown else ""
        rows.append((mark, name, made, len(one.cells), ", ".join(one.tasks), limit))
    text = [f"{store.directory}: {grid.name}"]
    if rows:
        text += ["", table(("", "run", "begun or unpacked", "cells", "tasks", "asked for"), rows)]
    cells = []
    for cell in grid.cells:
        record = store.get(cell)
        status, reason = status_of(record)
        spent = took(record) if record else NO_VALUE
        reason = reason or ", ".join(f"{task} failed" for task in record.failed_tasks)
        cells.append((cell.cell, status, cell.precision.name, cell.key[:KEY_DIGITS], spent, reason))
    text += ["", table(("cell", "status", "precision", "key", "took", ""), cells)]
    return "\n".join(text)
