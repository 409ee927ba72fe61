"""What a model answered to one task's requests, as a table: log-likelihoods or texts. The columns
are ``qbench.record.RESPONSE_COLUMNS``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from qbench.record import ANSWER_CHARACTERS, RESPONSE_COLUMNS

KINDS = {
    "document": "int64", "request": "int64", "log_likelihood": "float64", "greedy": bool,
    "cut": "int64",
}  # fmt: skip
Row = tuple[str, int, int, float, bool, str | None, str | None, int]


def responses_of(task: str, samples: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Of lm-eval's samples, one for each document and filter, in its order of requests."""
    rows: list[Row] = []
    asked = {sample["filter"]: None for sample in samples}
    for sample in samples:
        document = sample["doc_id"]
        if sample["filter"] == next(iter(asked)):
            rows += _given(task, document, sample["resps"])
        if sample["resps"] and isinstance(sample["resps"][0][0], str):
            rows += _taken(task, document, sample)
    return _table(rows)


def answers_table(task: str, answers: Sequence[str]) -> pd.DataFrame:
    """One generated answer a document."""
    return _table([_text(task, document, 0, None, text) for document, text in enumerate(answers)])


def _given(task: str, document: int, responses: Sequence[Sequence[Any]]) -> Iterable[Row]:
    """As the model gave them; an answer that was asked for several times has a row each."""
    for request, response in enumerate(responses):
        for repeat, answer in enumerate(response):
            number = request * len(response) + repeat
            if isinstance(answer, str):
                yield _text(task, document, number, None, answer)
            elif repeat == 0 and isinstance(answer, float | int):
                yield (task, document, request, float(answer), False, None, None, 0)
            elif repeat == 0 and isinstance(answer, list | tuple):
                value, greedy = float(answer[0]), bool(answer[1])
                yield (task, document, request, value, greedy, None, None, 0)


def _taken(task: str, document: int, sample: dict[str, Any]) -> Iterable[Row]:
    """What a filter took from generated answers, where that is not the answer itself."""
    pairs = zip(sample["filtered_resps"], sample["resps"], strict=True)
    for request, (taken, answers) in enumerate(pairs):
        if taken != answers[0]:
            text = taken if isinstance(taken, str) else json.dumps(taken, default=str)
            number = request * len(answers)
            yield _text(task, document, number, str(sample["filter"]), text)


def _text(task: str, document: int, request: int, filter_: str | None, text: str) -> Row:
    kept = text[:ANSWER_CHARACTERS].encode(errors="replace").decode()  # Parquet is UTF-8
    return (task, document, request, math.nan, False, kept, filter_, len(text) - len(kept))


def _table(rows: Sequence[Row]) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=list(RESPONSE_COLUMNS)).astype(KINDS)
    return table.astype({"answer": object, "filter": object})
