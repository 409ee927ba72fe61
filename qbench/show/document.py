"""One document of one cell: what was asked of the model and what it answered, beside what the
unquantized model did."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import pandas as pd

from qbench.comparison.metrics import LOG_SCALE
from qbench.errors import ResultsError
from qbench.records import GridCell, Record
from qbench.show.layout import table
from qbench.store import Store
from qbench.text import NO_VALUE, metric_title


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
    outcomes, responses = store.outcomes(record), store.responses(record)
    known = list(dict.fromkeys([*outcomes["task"], *responses["task"]]))
    if task is not None and task not in known:
        raise ResultsError(f"{record.cell}: no task {task}; it has {', '.join(known)}")
    base = unquantized(store, record)
    before = (store.outcomes(base), store.responses(base)) if base is not None else None
    names = [record.cell, *([base.cell] if base is not None else [])]
    summed = {
        one.metric for one in record.scores if one.aggregation in (*LOG_SCALE, "bits_per_byte")
    }
    parts = []
    for name in known if task is None else [task]:
        tables = [(outcomes, responses), *([before] if before else [])]
        scored, answered = zip(
            *((_of(o, name, document), _of(r, name, document)) for o, r in tables), strict=True
        )
        if scored[0].empty and answered[0].empty:
            continue
        parts.append(f"{name}, document {document}")
        parts += _asked((asked or {}).get(name, ()))
        if not scored[0].empty:
            parts.append(_metrics(names, scored, summed))
        texts = [one[one["answer"].notna()] for one in answered]
        likelihoods = [one[one["answer"].isna()] for one in answered]
        if not likelihoods[0].empty:
            parts.append(_requests(names, likelihoods))
        parts += [_written(cell, of) for cell, of in zip(names, texts, strict=True) if len(of)]
    if parts and record.quantized and base is None:
        parts.append("(the unquantized cell has no good record of these documents to show beside)")
    if not parts:
        last = int(outcomes["document"].max()) if len(outcomes) else -1
        raise ResultsError(f"{record.cell}: no document {document}; the last one is {last}")
    return "\n\n".join(parts)


def _asked(requests: Sequence[Sequence[str]]) -> list[str]:
    """Each request's texts; a context that all of them share stands once."""
    shared = {texts[0] for texts in requests} if len(requests) > 1 else set()
    parts = [f"asked\n{_indented(*shared)}"] if len(shared) == 1 else []
    for number, texts in enumerate(requests):
        own = texts[1:] if parts and len(shared) == 1 else texts
        if own:
            lines = "\n".join(_indented(text) for text in own)
            parts.append(f"request {number}\n{lines}")
    return parts


def unquantized(store: Store, record: Record) -> Record | None:
    """The good record of the unquantized cell that a quantized one is measured against; None for
    one that is unquantized, or where there is none."""
    if not record.quantized:
        return None
    key = record.key_parts.get("damage against")
    cells: list[GridCell] = []
    with suppress(ResultsError):  # a record's file alone, without its folder
        cells = [
            cell
            for cell in store.grid().cells
            if cell.checkpoint == record.checkpoint and not cell.quantized
        ]
    for cell in cells if key is None else [cell for cell in cells if cell.key == key]:
        found = store.whole(cell)
        if found is not None and found.status == "ok" and found.documents == record.documents:
            return found
    return None


def _of(rows: pd.DataFrame, task: str, document: int) -> pd.DataFrame:
    return rows[(rows["task"] == task) & (rows["document"] == document)]


def _metrics(names: list[str], scored: tuple[pd.DataFrame, ...], summed: Collection[str]) -> str:
    """Of those that are ``summed`` a document has a log-likelihood, which is no perplexity."""
    values = [dict(zip(one["metric"], one["value"], strict=True)) for one in scored]
    rows = [
        (_named(metric, summed), *(_shown(of.get(metric), "g") for of in values))
        for metric in values[0]
    ]
    return table(("metric", *names), rows)


def _named(metric: str, summed: Collection[str]) -> str:
    return metric_title(metric) + (": log-likelihood" if metric in summed else "")


def _requests(names: list[str], asked: list[pd.DataFrame]) -> str:
    """Log-likelihoods of each request, which one is the likeliest, and what is greedy."""
    rows = []
    columns = [dict(zip(one["request"], one["log_likelihood"], strict=True)) for one in asked]
    best = [max(of, key=of.__getitem__, default=None) for of in columns]
    greedy = dict(zip(asked[0]["request"], asked[0]["greedy"], strict=True))
    for request in columns[0]:
        cells: list[str] = []
        for of, chosen in zip(columns, best, strict=True):
            mark = " likeliest" if request == chosen and len(of) > 1 else ""
            cells.append(_shown(of.get(request), ".4f") + mark)
        rows.append((request, *cells, "yes" if greedy[request] else ""))
    return table(("log-likelihood of request", *names, "greedy"), rows)


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


def _shown(value: float | None, form: str) -> str:
    return NO_VALUE if value is None else format(value, form)
