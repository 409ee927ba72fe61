"""Score one task through lm-eval's Task API and parse its results.

Requests, filters, metrics and aggregations are lm-eval's, drawn with its seeds. No other module
reads lm-eval's strings.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from lm_eval.api.metrics import (
    aggregate_subtask_metrics,
    mean,
    pooled_sample_stderr,
    unweighted_mean_stderr,
)
from lm_eval.api.registry import AGGREGATION_REGISTRY
from lm_eval.tasks import TaskManager

from qbench.errors import DataError, EvaluationError, QbenchError, first_line
from qbench.evaluation.degradation import Outcomes, right_choice
from qbench.evaluation.loaded import LoadedTask, check_documents, load_task, seed_generators
from qbench.evaluation.settings import FEWSHOT_SEED, ScoringSettings
from qbench.evaluation.tasks import TaskSpec
from qbench.metrics import LOG_SCALE, base_metric, perplexity, variance_name
from qbench.records import (
    ANSWER_CHARACTERS,
    OUTCOME_COLUMNS,
    RESPONSE_COLUMNS,
    GroupScore,
    Question,
    Record,
    Score,
)

if TYPE_CHECKING:
    from qbench.evaluation.definitions import TaskGroup
    from qbench.evaluation.scoring import HFLMScorer, Scorer

RESPONSE_DTYPES = {
    "document": "int64", "request": "int64", "log_likelihood": "float64", "greedy": bool,
    "cut": "int64",
}  # fmt: skip
Response = tuple[str, int, int, float, bool, str | None, str | None, int]


@dataclass(frozen=True, slots=True)
class _Sample:
    """One document under one of the task's filters."""

    document: int
    filter: str
    resps: list[list[Any]]  # of each request, an answer for each time that it was asked
    filtered: list[Any]
    metrics: dict[str, Any]
    variances: dict[str, float] = field(default_factory=dict)  # of metrics, if answers are drawn


def evaluate(model: Scorer | HFLMScorer, task: LoadedTask, settings: ScoringSettings) -> Outcomes:
    """Score one task with ``model``. Batches hold requests of this task alone.

    Raises DataError if a document asks nothing or has no right answer, EvaluationError if a
    log-likelihood or a score is not a number.
    """
    check_documents(task, settings.limit)
    build_requests(task.task, settings, model)
    with _context(model, task.max_length):
        _answer(model, task.task.instances)
    with _named(task.name, "its answers cannot be judged"):
        samples = list(_samples(task.task, settings.limit))
    outcomes = _outcomes(task.name, samples)
    scores = tuple(_scores(task, samples, outcomes))
    responses = _responses(task.name, samples)
    _refuse_not_a_number(task.name, scores, responses)
    return Outcomes(scores=scores, outcomes=outcomes, responses=responses)


@contextmanager
def _context(model: Any, max_length: int | None) -> Iterator[None]:
    """Let ``model`` generate with ``max_length`` tokens of prompt and answer, if it is given."""
    hflm = getattr(model, "hflm", None)
    if hflm is None or max_length is None:
        yield
        return
    usual, hflm._max_length = hflm._max_length, max_length
    try:
        yield
    finally:
        hflm._max_length = usual


@contextmanager
def _named(task: str, what: str) -> Iterator[None]:
    """Raise errors of lm-eval's code and of the task's own as EvaluationError with the
    task's name.
    """
    try:
        yield
    except QbenchError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise EvaluationError(f"{task}: {what} ({why})") from error


def build_requests(task: Any, settings: ScoringSettings, model: Any = None) -> None:
    """Build the ``instances`` of an lm-eval task as its ``simple_evaluate`` does.

    Seeds are counted from lm-eval's, so that seed 0 draws what lm-eval draws. ``model`` has the
    chat template that ``settings.chat`` may ask for. Raises EvaluationError if that has no system
    role and one is needed.
    """
    seed_generators(settings.seed)
    TaskManager(include_defaults=False).load([task])  # asks for its name, which draws each time
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=settings.fewshot_seed)
    chat: dict[str, Any] = asdict(settings.chat) if settings.chat else {}
    if settings.chat and settings.chat.apply_chat_template:
        renderer = model.hflm if hasattr(model, "hflm") else model.model
        _require_system_role(renderer, task, settings.chat.system_instruction)
        chat["chat_template"] = renderer.apply_chat_template
    task.build_all_requests(limit=settings.limit, rank=0, world_size=1, **chat)


def _require_system_role(renderer: Any, task: Any, instruction: str | None) -> None:
    """Raises EvaluationError if the template has no place for a system instruction or the task's
    description, which lm-eval would leave out with a warning."""
    name, text, remedy = "evaluation.system_instruction", instruction, "leave it out"
    if text is None:
        document = next(iter(task.eval_docs), {})
        name, text = f"{task.config.task}: description", task.resolve_field(
            document, task.config.description
        )  # fmt: skip
        remedy = "put it into the task's doc_to_text"
    text = str(text or "").strip()
    turns = [{"role": "system", "content": text}, {"role": "user", "content": "?"}]
    if text and text not in renderer.apply_chat_template(turns):
        raise EvaluationError(f"{name}: the model's chat template has no system role; {remedy}")


def rebuild_requests(
    record: Record, specs: Sequence[TaskSpec], documents: int, task: str | None = None
) -> dict[str, dict[int, Question]]:
    """Return what was asked, by task and document, for the first ``documents``.

    Records do not keep prompts; they are made again from the recipe and its data. Prompts that are
    made for a tokenizer are left out: those that are sized by it, and conversations. Raises
    DataError if recipe and data ask something else than the record's cell was asked.
    """
    scoring = record.key_parts.get("scoring") or {}
    settings = ScoringSettings(
        mode="exact",
        max_length=1,
        batch_size=1,
        window_batch_size=1,
        limit=documents,  # from the first on: a generator that goes on draws the examples
        seed=scoring.get("seed", 0),
        fewshot_seed=scoring.get("fewshot_seed", FEWSHOT_SEED),
    )
    questions = {}
    for spec in specs:
        if spec.name not in record.documents or task not in (None, spec.name):
            continue
        if spec.needs_tokenizer or scoring.get("chat"):
            continue
        loaded = load_task(spec)
        if loaded.digest != record.documents[spec.name]:
            raise DataError(
                f"{spec.name}: this recipe or its data differ from those of {record.cell}; name "
                "those that it was run with"
            )
        build_requests(loaded.task, settings)
        instances: dict[int, list[Any]] = defaultdict(list)
        for instance in loaded.task.instances:
            instances[instance.doc_id].append(instance)
        questions[spec.name] = {
            document: Question(
                tuple(
                    tuple(t for t in instance.args if isinstance(t, str)) for instance in requests
                ),
                _target(loaded.task, requests[0].doc),
            )
            for document, requests in instances.items()
        }
    return questions


def _target(task: Any, document: Mapping[str, Any]) -> int | str | None:
    """Return the index of the right choice, or the right text; None if there is neither."""
    with suppress(Exception):  # a task's own code, for display alone
        if task.OUTPUT_TYPE == "multiple_choice":
            return right_choice(task, document)
        if task.OUTPUT_TYPE == "generate_until":
            target = task.doc_to_target(document)
            return target if isinstance(target, str) else " | ".join(map(str, target))
    return None


def _answer(model: Any, instances: Sequence[Any]) -> None:
    """Let ``model`` answer the requests of each kind together, each as often as it repeats."""
    kinds: dict[str, list[Any]] = defaultdict(list)
    for instance in instances:
        kinds[instance.request_type] += [instance] * instance.repeats
    for kind, requests in kinds.items():
        for answer, request in zip(getattr(model, kind)(requests), requests, strict=True):
            request.resps.append(answer)


def _samples(task: Any, limit: int | None) -> Iterator[_Sample]:
    """Yield each document with its metrics, filter by filter. Of several drawn answers they are
    means, with their variances, unless a filter makes one answer of all."""
    if (repeats := _drawn_repeats(task)) < 2:
        yield from _judged(task, limit)
        return
    answers = [instance.resps for instance in task.instances]
    rounds = []
    for repeat in range(repeats):
        for instance, given in zip(task.instances, answers, strict=True):
            instance.resps = [given[repeat]]
        rounds.append(list(_judged(task, limit)))
    for instance, given in zip(task.instances, answers, strict=True):
        instance.resps = given
    for same in zip(*rounds, strict=True):
        values = {
            name: [float(each.metrics[name]) for each in same]
            for name, value in same[0].metrics.items()
            if isinstance(value, bool | int | float | np.number | np.bool_)
        }
        resps = [
            [part for each in same for part in each.resps[i]] for i in range(len(same[0].resps))
        ]
        yield replace(
            same[0],
            resps=resps,
            metrics=same[0].metrics | {name: fmean(each) for name, each in values.items()},
            variances={name: variance(each) / repeats for name, each in values.items()},
        )


def _drawn_repeats(task: Any) -> int:
    """Return how many answers are drawn to each request; 1 if they are not drawn, or a filter such
    as majority_vote takes all of them."""
    drawn = (task.config.generation_kwargs or {}).get("do_sample")
    filters = [part for ensemble in task._filters for part in ensemble.filters]
    names = {getattr(part, "func", part).__name__ for part in filters}
    all_answers_filters = names & {"TakeKFilter", "MajorityVoteFilter", "CustomFilter"}
    generates = task.OUTPUT_TYPE == "generate_until"
    return task.instances[0].repeats if generates and drawn and not all_answers_filters else 1


def _judged(task: Any, limit: int | None) -> Iterator[_Sample]:
    """Yield each document with lm-eval's metrics, filter by filter."""
    task.apply_filters()
    requests: dict[int, list[Any]] = defaultdict(list)
    for instance in task.instances:
        requests[instance.doc_id].append(instance)
    for instances in requests.values():
        instances.sort(key=lambda instance: instance.idx)
    for name in task.instances[0].filtered_resps:
        for number, document in task.doc_iterator(rank=0, limit=limit, world_size=1):
            instances = requests[number]
            filtered = [instance.filtered_resps[name] for instance in instances]
            metrics = task.process_results(document, filtered)
            yield _Sample(
                number, name, [instance.resps for instance in instances], filtered, metrics
            )


def _outcomes(task: str, samples: Sequence[_Sample]) -> pd.DataFrame:
    """Return a table with the columns ``OUTCOME_COLUMNS``.

    Of a metric with two numbers per document they are ``value`` and ``weight``: a value and its
    weight, or right answer and prediction (see ``comparison.flips``). Of drawn answers the
    variances stand beside.
    """
    rows = []
    for sample in samples:
        for metric, value in sample.metrics.items():
            pair = value if isinstance(value, list | tuple) and len(value) == 2 else (value, 1.0)
            if all(
                isinstance(number, bool | int | float | np.number | np.bool_) for number in pair
            ):
                name = _name(metric, sample.filter)
                rows.append((task, sample.document, name, float(pair[0]), float(pair[1])))
            if metric in sample.variances:
                name = variance_name(_name(metric, sample.filter))
                rows.append((task, sample.document, name, sample.variances[metric], 1.0))
    return pd.DataFrame(rows, columns=list(OUTCOME_COLUMNS)).astype({"document": "int64"})


def _scores(
    task: LoadedTask, samples: Sequence[_Sample], outcomes: pd.DataFrame
) -> Iterator[Score]:
    items: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for sample in samples:
        for metric, value in sample.metrics.items():
            items[metric, sample.filter].append(value)
    names = {function: name for name, function in AGGREGATION_REGISTRY.items()}
    documents = max(map(len, items.values()), default=0)
    for (metric, filter_), values in items.items():
        aggregate = task.task.aggregation().get(metric, mean)
        aggregation = names.get(aggregate, getattr(aggregate, "__name__", "unknown"))
        name = _name(metric, filter_)
        with _named(task.name, f"{name} cannot be computed; leave it out of the metric_list"):
            try:
                value = aggregate(values)
            except OverflowError:
                if aggregation not in LOG_SCALE:
                    raise
                value = math.inf  # a perplexity beyond the largest double
        if not isinstance(value, int | float | np.number):
            continue
        yield Score(
            task=task.name,
            label=task.label,
            metric=name,
            value=float(value),
            stderr=_standard_error(aggregation, outcomes.loc[outcomes["metric"] == name, "value"]),
            higher_is_better=bool(task.task.higher_is_better().get(metric, True)),
            aggregation=aggregation,
            documents=documents,
        )


def group_scores(groups: Sequence[TaskGroup], scores: Sequence[Score]) -> tuple[GroupScore, ...]:
    """Return the scores of groups all of whose tasks have been scored, by lm-eval's arithmetic."""
    scored = []
    for group in groups:
        by_task = {task: {s.metric: s for s in scores if s.task == task} for task in group.tasks}
        if not all(by_task.values()):
            continue
        metrics = dict.fromkeys(metric for of in by_task.values() for metric in of)
        for group_metric in group.metrics:
            names = [metric for metric in metrics if base_metric(metric) == group_metric.metric]
            if group_metric.filters is not None:
                names = [_name(group_metric.metric, filter_) for filter_ in group_metric.filters]
            for metric in names:
                members = [of[metric] for of in by_task.values() if metric in of]
                if members:
                    scored.append(_group_score(group, group_metric.weight_by_size, metric, members))
    return tuple(scored)


def _group_score(
    group: TaskGroup, weight_by_size: bool, metric: str, scores: Sequence[Score]
) -> GroupScore:
    sizes = [score.documents for score in scores]
    errors = [score.stderr for score in scores if score.stderr is not None]
    stderr = None
    if len(errors) == len(scores):
        stderr = float(
            pooled_sample_stderr(errors, sizes)
            if weight_by_size
            else unweighted_mean_stderr(errors)
        )
    return GroupScore(
        group=group.name,
        label=group.label,
        metric=metric,
        value=aggregate_subtask_metrics([s.value for s in scores], sizes, weight_by_size),
        stderr=stderr,
        higher_is_better=scores[0].higher_is_better,
        weight_by_size=weight_by_size,
        documents=sum(sizes),
        tasks=tuple(score.task for score in scores),
    )


def _standard_error(aggregation: str, values: pd.Series) -> float | None:
    """Return the standard error of a mean; of a perplexity exp(−mean) times that of the
    log-likelihoods (delta method), which lm-eval's bootstrap estimates. None for other
    aggregations.
    """
    if len(values) < 2 or aggregation not in ("mean", "perplexity"):
        return None
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    return error if aggregation == "mean" else error * perplexity(-fmean(values))


def _name(metric: str, filter_: str) -> str:
    return metric if filter_ == "none" else f"{metric} [{filter_}]"


def _responses(task: str, samples: Sequence[_Sample]) -> pd.DataFrame:
    """Return log-likelihoods and texts with the columns ``RESPONSE_COLUMNS``, in lm-eval's order of
    filters, documents and requests.
    """
    rows: list[Response] = []
    for sample in samples:
        if sample.filter == samples[0].filter:
            rows += _given(task, sample)
        if sample.resps and isinstance(sample.resps[0][0], str):
            rows += _taken(task, sample)
    return response_table(rows)


def response_table(rows: Sequence[Response]) -> pd.DataFrame:
    """Return ``rows`` as a table with the columns ``RESPONSE_COLUMNS``."""
    table = pd.DataFrame(rows, columns=list(RESPONSE_COLUMNS)).astype(RESPONSE_DTYPES)
    return table.astype({"answer": object, "filter": object})


def _given(task: str, sample: _Sample) -> Iterator[Response]:
    """Yield the model's answers; one that was asked for several times has a row each."""
    for request, answers in enumerate(sample.resps):
        for repeat, answer in enumerate(answers):
            if isinstance(answer, str):
                yield text_response(
                    task, sample.document, request * len(answers) + repeat, None, answer
                )
            elif repeat == 0:
                value, greedy = answer if isinstance(answer, list | tuple) else (answer, False)
                number = float(value), bool(greedy)
                yield (task, sample.document, request, *number, None, None, 0)


def _taken(task: str, sample: _Sample) -> Iterator[Response]:
    """Yield what a filter made of generated answers, if that is not the answer itself."""
    for request, (taken, answers) in enumerate(zip(sample.filtered, sample.resps, strict=True)):
        if taken != answers[0]:
            text = taken if isinstance(taken, str) else json.dumps(taken, default=str)
            yield text_response(task, sample.document, request * len(answers), sample.filter, text)


def text_response(
    task: str, document: int, request: int, filter_: str | None, text: str
) -> Response:
    """Return the row of a generated text, cut to ``ANSWER_CHARACTERS``."""
    kept = text[:ANSWER_CHARACTERS].encode(errors="replace").decode()  # Parquet is UTF-8
    return (task, document, request, math.nan, False, kept, filter_, len(text) - len(kept))


def _refuse_not_a_number(task: str, scores: tuple[Score, ...], responses: pd.DataFrame) -> None:
    responses = responses[responses["answer"].isna()]  # texts have none
    bad = ~np.isfinite(responses["log_likelihood"].to_numpy(dtype=float))
    if bad.any():
        raise EvaluationError(
            f"{task}: {int(bad.sum())} of {len(bad)} log-likelihoods are not numbers, the first "
            f"in document {int(responses['document'].to_numpy()[bad][0])}; the model gives NaN or "
            "infinite logits there, which no scoring mode can fix"
        )
    for score in scores:
        if math.isnan(score.value):
            raise EvaluationError(f"{task}: {score.metric} is not a number")
