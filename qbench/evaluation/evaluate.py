"""One task through lm-eval's Task API, its results parsed into our words. The border to lm-eval's
strings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qbench.errors import DataError, EvaluationError
from qbench.evaluation import passkey
from qbench.evaluation.settings import (
    FEWSHOT_SEED,
    NUMPY_SEED,
    RANDOM_SEED,
    TORCH_SEED,
    ScoringSettings,
)
from qbench.evaluation.tasks import LoadedTask, TaskSpec, check_labels, load_task
from qbench.records import ANSWER_CHARACTERS, OUTCOME_COLUMNS, RESPONSE_COLUMNS, Record, Score

if TYPE_CHECKING:
    from qbench.evaluation.scoring.hflm import Yardstick
    from qbench.evaluation.scoring.scorer import Scorer


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


Requests = tuple[tuple[str, ...], ...]  # of each request its texts: context and continuation


def asked(
    record: Record, planned: Sequence[TaskSpec], document: int, task: str | None = None
) -> dict[str, Requests]:
    """By task, the requests of ``document``. Left out are tasks that have no such document, and
    passkey retrieval, whose prompts are made for a tokenizer.

    Raises DataError where recipe and data ask something else than the record's cell was asked.
    """
    found = {}
    for one in planned:
        if one.name not in record.documents or task not in (None, one.name):
            continue
        if one.output_type == passkey.KIND:
            continue
        loaded = load_task(one)
        if loaded.digest != record.documents[one.name]:
            raise DataError(
                f"{one.name}: this recipe and its data ask something else than {record.cell} was "
                "asked; name those that it was run with"
            )
        if document < loaded.documents:
            found[one.name] = _requests(loaded, record, document)
    return found


def _requests(loaded: LoadedTask, record: Record, document: int) -> Requests:
    """Built by lm-eval as for a model: it draws with its own seeds, and before the task does."""
    from qbench.evaluation.scoring.asked import Known, Nobody

    scoring = record.key_parts.get("scoring") or {}
    settings = ScoringSettings(
        mode="exact",
        max_length=1,
        batch_size=1,
        window_batch_size=1,
        limit=document + 1,  # from the first on: a generator that goes on draws the examples
        seed=scoring.get("seed", 0),
        fewshot_seed=scoring.get("fewshot_seed", FEWSHOT_SEED),
    )
    with suppress(Known):
        evaluate(Nobody(), loaded, settings)
    return tuple(
        tuple(text for text in one.args if isinstance(text, str))
        for one in loaded.task.instances
        if one.doc_id == document
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    """What one task gave: scores, and the tables that they aggregate (see ``qbench.record``)."""

    scores: tuple[Score, ...]
    outcomes: pd.DataFrame
    responses: pd.DataFrame


def evaluate(model: Scorer | Yardstick, task: LoadedTask, settings: ScoringSettings) -> TaskResult:
    """Score one task with lm-eval; requests of one task alone, so batches depend on no other.
    Passkey retrieval is decoded by our own loop, see :mod:`qbench.evaluation.passkey`.

    Raises DataError where a document has no right answer, EvaluationError where a
    log-likelihood or a score is not a number.
    """
    if task.kind == passkey.KIND:
        return _passkey(model, task, settings)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from qbench.evaluation.scoring.overhead import less_overhead

    check_labels(task, settings.limit)
    with less_overhead():
        results = simple_evaluate(
            model=model,
            tasks=[task.task],
            task_manager=TaskManager(include_defaults=False),
            limit=settings.limit,
            bootstrap_iters=0,  # the standard errors are computed below, without 100,000 rounds
            log_samples=True,
            # Counted from lm-eval's defaults, so that seed 0 draws what lm-eval draws.
            random_seed=RANDOM_SEED + settings.seed,
            numpy_random_seed=(NUMPY_SEED + settings.seed) % 2**32,
            torch_random_seed=TORCH_SEED + settings.seed,
            fewshot_random_seed=settings.fewshot_seed,
        )
    (own_name,) = results["samples"]
    samples = results["samples"][own_name]
    outcomes = _outcomes(task.name, samples)
    scores = tuple(_scores(task, results["results"][own_name], outcomes))
    responses = responses_of(task.name, samples)
    _refuse_not_a_number(task.name, scores, responses)
    return TaskResult(scores=scores, outcomes=outcomes, responses=responses)


def _passkey(model: Scorer | Yardstick, task: LoadedTask, settings: ScoringSettings) -> TaskResult:
    """Exact match of the greedily decoded key, and how many of its digits stand in their places."""
    tokenizer = model.hflm.tokenizer
    asked = passkey.prompts(task.task, tokenizer, limit=settings.limit, add_bos=settings.add_bos)
    tokens = model.greedy(asked.ids, max(asked.answers))
    answers = [
        tokenizer.decode(own[:count]) for own, count in zip(tokens, asked.answers, strict=True)
    ]
    columns = zip(("exact_match", "acc_digits"), passkey.scores(answers, asked.keys), strict=True)
    outcomes = pd.DataFrame(
        [
            (task.name, document, metric, value, 1.0)
            for metric, values in columns
            for document, value in enumerate(values)
        ],
        columns=list(OUTCOME_COLUMNS),
    ).astype({"document": "int64"})
    scores = []
    for metric, values in outcomes.groupby("metric", sort=False)["value"]:
        score = Score(
            task=task.name,
            label=task.label,
            metric=str(metric),
            value=float(values.mean()),
            stderr=_standard_error("mean", values),
            higher_is_better=True,
            aggregation="mean",
            documents=len(values),
        )
        scores.append(score)
    responses = answers_table(task.name, answers)
    return TaskResult(scores=tuple(scores), outcomes=outcomes, responses=responses)


def _outcomes(task: str, samples: list[dict[str, Any]]) -> pd.DataFrame:
    rows = []
    for sample in samples:
        for metric in sample["metrics"]:
            value = sample[metric]
            weight = 1.0
            if isinstance(value, list | tuple) and len(value) == 2:
                value, weight = value
            if isinstance(value, bool | int | float) and isinstance(weight, int | float):
                name = _name(metric, sample["filter"])
                rows.append((task, sample["doc_id"], name, float(value), float(weight)))
    return pd.DataFrame(rows, columns=list(OUTCOME_COLUMNS)).astype({"document": "int64"})


def _scores(task: LoadedTask, results: dict[str, Any], outcomes: pd.DataFrame) -> list[Score]:
    scores = []
    for key, value in results.items():
        metric, _, filter_ = key.partition(",")
        if not filter_ or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        name = _name(metric, filter_)
        values = outcomes.loc[outcomes["metric"] == name, "value"]
        aggregation = _aggregation(task.task, metric)
        scores.append(
            Score(
                task=task.name,
                label=task.label,
                metric=name,
                value=float(value),
                stderr=_standard_error(aggregation, values),
                higher_is_better=bool(task.task.higher_is_better().get(metric, True)),
                aggregation=aggregation,
                documents=int(results.get("sample_len", len(values))),
            )
        )
    return scores


def _aggregation(task: Any, metric: str) -> str:
    from lm_eval.api.registry import AGGREGATION_REGISTRY

    function = task.aggregation().get(metric)
    names = {known: name for name, known in AGGREGATION_REGISTRY.items()}
    return names.get(function, getattr(function, "__name__", "unknown"))


def _standard_error(aggregation: str, values: pd.Series) -> float | None:
    """Sample standard deviation/√n for means; for perplexities exp(−mean) times that of the
    log-likelihoods (delta method), which lm-eval's bootstrap estimates."""
    if len(values) < 2 or aggregation not in ("mean", "perplexity"):
        return None
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    return error if aggregation == "mean" else error * math.exp(-fmean(values))


def _name(metric: str, filter_: str) -> str:
    return metric if filter_ == "none" else f"{metric} [{filter_}]"


def _refuse_not_a_number(task: str, scores: tuple[Score, ...], responses: pd.DataFrame) -> None:
    responses = responses[responses["answer"].isna()]  # texts have none
    bad = ~np.isfinite(responses["log_likelihood"].to_numpy(dtype=float))
    if bad.any():
        raise EvaluationError(
            f"{task}: {int(bad.sum())} of {len(bad)} log-likelihoods are not numbers, the first "
            f"in document {int(responses['document'].to_numpy()[bad][0])}; the model gives NaN or "
            "infinite logits there, which no scoring mode can mend"
        )
    for score in scores:
        if math.isnan(score.value):
            raise EvaluationError(f"{task}: {score.metric} is not a number")
