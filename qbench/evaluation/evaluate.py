"""Make lm-eval's object of a planned task, check its documents, score it through lm-eval's Task API
and parse its results. lm-eval would count documents without a usable answer as wrong.

Requests, filters, metrics and aggregations are lm-eval's, drawn with its seeds. No other module
reads lm-eval's strings.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import json
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd
import torch
from datasets import Dataset, DatasetDict
from jinja2 import Template
from lm_eval import utils
from lm_eval.api.metrics import (
    aggregate_subtask_metrics,
    mean,
    pooled_sample_stderr,
    unweighted_mean_stderr,
)
from lm_eval.api.registry import AGGREGATION_REGISTRY, METRIC_REGISTRY, get_metric_aggregation
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from pyarrow import ArrowException

from qbench import hub
from qbench.errors import DataError, EvaluationError, QbenchError, first_line
from qbench.evaluation.scoring.batching import KEPT_CHARACTERS, characters
from qbench.evaluation.settings import FEWSHOT_SEED, AnswerSettings, ScoringSettings
from qbench.evaluation.tasks import (
    INSTALLED,
    TaskSpec,
    definition_digest,
    evaluation_split,
    fewshot_split,
    missing_module,
    prompt_fields,
    read_definition,
    read_rows,
)
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
    from qbench.evaluation.scoring import HFLMScorer, Scorer
    from qbench.evaluation.tasks import TaskGroup


T = TypeVar("T")
SPLIT_KEYS = ("training_split", "validation_split", "test_split", "fewshot_split")
# Keys on the source of documents, which do not change prompts.
ORIGIN_KEYS = {"custom_dataset", "dataset_kwargs", "metadata", "tag", *SPLIT_KEYS}
TEMPLATES = ("doc_to_text", "doc_to_target", "doc_to_choice", "process_results")
KEPT = 256  # tasks in memory
LEAST_SAMPLE = 8  # documents: of fewer a skewed bias passes too often
# fields that a template prints as they are
printed = functools.cache(re.compile(r"\{\{\s*(\w+)\s*\}\}").findall)
INDEXES = ("label", "gold")  # usual names of the field that says which choice is right
TEXTS = ("answerKey", "answer")  # and of those that say it in words


@functools.cache
def _compiled(template: str) -> Template:
    """Return lm-eval's template, which it compiles anew for every document and every question."""
    compiled = utils.env.from_string(template)
    # a chain of dictionaries, which each rendering would copy in Python
    compiled.globals = dict(compiled.globals)
    return compiled


utils.apply_template = lambda template, doc: _compiled(template).render(**doc)


class TemplateTask(ConfigurableTask):
    """lm-eval's task without repeated work; its prompts are the same.

    A document's prompt, answer and choices are made once: lm-eval asks for each about five times,
    60,000 renderings for five tasks of a cell. Zero-shot requests are built once for all models
    of a process, unless the definition's own code changes them: that saves 0.3 s per cell of
    ARC-easy.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._made: dict[int, dict[tuple[str, Any], Any]] = {}  # by id of the document
        self._built: dict[str, Any] | None = None
        self._documents: list[dict[str, Any]] | None = None
        super().__init__(config={key: value for key, value in config.items() if key != "class"})
        self.has_code = any(callable(getattr(self.config, name)) for name in TEMPLATES)
        # whether its requests do not depend on earlier random draws
        self.draws_nothing = not self.has_code and not self.config.num_fewshot
        if not self.has_code:  # code might change a document
            self._documents = list(super().eval_docs)
            self._made = {id(document): {} for document in self._documents}

    @property
    def eval_docs(self) -> Any:
        """Return the documents, read from the data set only once; lm-eval reads them five times."""
        return super().eval_docs if self._documents is None else self._documents

    def fewshot_docs(self) -> Any:
        """Return lm-eval's documents for few-shot examples. None if there are no examples, unless
        ``process_docs`` has to run on them, since it may draw at random."""
        drawn = self.config.num_fewshot or self.config.process_docs is not None  # which may draw
        return super().fewshot_docs() if drawn else None

    def _once(self, name: str, doc: Any, template: Any = None) -> Any:
        """Return what lm-eval's method ``name`` gives for ``doc``; twice the same object."""
        made, key = self._made.get(id(doc)), (name, template)
        if made is None or not (template is None or isinstance(template, str)):
            return getattr(super(), name)(doc, template)
        if key not in made:
            made[key] = getattr(super(), name)(doc, template)
        return made[key]

    def doc_to_text(self, doc: Any, doc_to_text: Any = None) -> Any:
        return self._once("doc_to_text", doc, doc_to_text)

    def doc_to_target(self, doc: Any, doc_to_target: Any = None) -> Any:
        return self._once("doc_to_target", doc, doc_to_target)

    def doc_to_choice(self, doc: Any, doc_to_choice: Any = None) -> Any:
        return self._once("doc_to_choice", doc, doc_to_choice)

    def build_all_requests(self, **settings: Any) -> None:
        """Build the task's ``instances``, without answers. If building draws nothing at random and
        ``settings``, lm-eval's arguments, are those of the last call, these instances are kept for
        the next model and only their answers are removed."""
        if not self.draws_nothing or self._built != settings:
            super().build_all_requests(**settings)
            self._built = settings
        for instance in self.instances:
            instance.resps, instance.filtered_resps = [], {}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedTask:
    """A task with its documents in memory."""

    name: str
    label: str
    task: ConfigurableTask
    digest: str  # of definition and documents, whatever their source
    max_length: int | None = None  # in place of the cell's, for prompts of a length of their own
    lines: tuple[tuple[Path, int], ...] = ()  # file and line of each document, where it has one
    answers: AnswerSettings | None = None  # of the task ``ANSWERS``

    def location(self, document: int) -> str:
        """Return a document's place for messages: ``file:line``, or ``document N``."""
        if self.lines:
            path, line = self.lines[document]
            return f"{path}:{line}"
        return f"document {document}"


@functools.lru_cache(maxsize=KEPT)
def load_task(spec: TaskSpec, tokenizer: Path | None = None) -> LoadedTask:
    """Return lm-eval's object of ``spec``; a process gets the same one each time.

    ``tokenizer`` is the folder of the checkpoint's, for a definition whose prompts have a length in
    tokens (``spec.needs_tokenizer``). Raises DataError if definition or data changed since they
    were planned, or if lm-eval cannot use them.
    """
    config = read_definition(spec.definition)
    config["num_fewshot"] = spec.num_fewshot
    for entry in config.get("metric_list") or ():
        metric = entry.get("metric") if isinstance(entry, dict) else None
        unstated = isinstance(metric, str) and "aggregation" not in entry
        if unstated and get_metric_aggregation(metric) is None:
            raise _unknown_metric(spec, metric)
    try:
        overrides, lines = _overrides(spec, config)
        if tokenizer is not None:
            metadata = config.get("metadata") or {}
            overrides["metadata"] = {**metadata, "tokenizer": str(tokenizer)}
        # By lm-eval's task manager from the definition itself: its index of all definitions would
        # take twenty seconds.
        definition = {"class": TemplateTask, **load_yaml(spec.definition), **overrides}
        if callable(process := definition.get("process_docs")):
            # lm-eval asks for processed documents again and again: of data in memory, a definition
            # that draws would make other ones each time, so that answers met other choices than
            # were asked.
            definition["process_docs"] = functools.cache(process)
        # As lm-eval does before it builds tasks: some shuffle their choices meanwhile (gpqa).
        seed_generators()
        (task,) = TaskManager(include_defaults=False).load([definition])["tasks"].values()
    except DataError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None:
            raise
        raise DataError(f"{spec.name}: {missing_module(error.name)}") from error
    except Exception as error:
        if hub.is_hub_error(error):
            raise DataError(
                f"{spec.name}: its data cannot be fetched from the hub: {hub.reason(error)}; try "
                f"again, or put them into DIR/{spec.name}/{evaluation_split(config)}.jsonl and add "
                "--data DIR"
            ) from error
        line = f"{spec.name}: {spec.definition}: {type(error).__name__}: {first_line(error)}"
        own = not any(map(spec.definition.is_relative_to, INSTALLED))
        wrong = " or ".join(["its data"] * bool(spec.files) + ["its definition"] * own)
        remedy = f"correct {wrong}, or leave" if wrong else "leave"
        raise DataError(f"{line}; {remedy} the task out") from error
    if definition_digest(read_definition(spec.definition)) != spec.definition_digest:
        raise DataError(
            f"{spec.name}: its definition, {spec.definition}, or the code or data that it names, "
            "changed after this run began; run again"
        )
    if spec.hub_data is not None:  # without the hub, datasets takes another commit's copy
        files = [file["filename"] for part in task.dataset.values() for file in part.cache_files]
        for file in files:
            if spec.hub_data.commit not in Path(file).parts:
                raise DataError(
                    f"{spec.name}: {spec.hub_data.repository} was planned at commit "
                    f"{spec.hub_data.commit[:12]}, but another copy was loaded "
                    f"({file}); run again where the hub can be reached"
                )
    own_function = callable(task.config.process_results)
    for metric, aggregate in task.aggregation().items():
        if aggregate is None or not (own_function or task._metric_fn_list.get(metric, True)):
            raise _unknown_metric(spec, metric)
    # lm-eval draws one more if it leaves out the document that is scored
    count = task.config.num_fewshot or 0
    needed = count + (task.fewshot_cfg.split == task.config.test_split)
    if count and (documents := len(task.sampler.df)) < needed:
        raise DataError(
            f"{spec.name}: num_fewshot {count}: there are {documents} documents to draw examples "
            f"from, {needed} are needed; lower num_fewshot"
        )
    if getattr(task, "MULTIMODAL", False):  # which a class may say without its definition
        raise DataError(f"{spec.name}: it asks about images or sound; leave the task out")
    if len(lines) != len(task.eval_docs):
        lines = ()
    return LoadedTask(
        name=spec.name,
        label=spec.label,
        task=task,
        digest=_digest(task, spec.answers),
        answers=spec.answers,
        max_length=spec.max_length,
        lines=lines,
    )


def _overrides(
    spec: TaskSpec, config: dict[str, Any]
) -> tuple[dict[str, Any], tuple[tuple[Path, int], ...]]:
    """Return the keys that replace those of the definition, so that it reads the planned data; and
    (file, line) of each evaluated row. Raises DataError if a file changed."""
    overrides: dict[str, Any] = {"task": spec.name}
    if spec.stated_fewshot is not None:
        overrides["num_fewshot"] = spec.stated_fewshot
    if spec.hub_data is not None:
        kwargs = config.get("dataset_kwargs") or {}
        return {**overrides, "dataset_kwargs": {**kwargs, "revision": spec.hub_data.commit}}, ()
    if not spec.files:
        return overrides, ()
    splits: dict[str, Dataset] = {}
    lines: tuple[tuple[Path, int], ...] = ()
    for file in spec.files:
        rows, digest = read_rows(file.path)
        if digest != file.digest:
            raise DataError(f"{spec.name}: {file.path} changed after this run began; run again")
        prompts = spec.answers is not None and not spec.answers.from_task
        fields = [prompt_fields(row, file.path) if prompts else row.fields for row in rows]
        try:
            splits[file.split] = Dataset.from_list(fields)
        except ArrowException as error:
            raise DataError(
                f"{spec.name}: {file.path}: a field holds values of several kinds "
                f"({first_line(error)}); write the same kind in every line"
            ) from None
        if file.split == evaluation_split(config) and not config.get("process_docs"):
            lines = tuple((file.path, row.line) for row in rows)
    for key in SPLIT_KEYS:
        if config.get(key) not in (None, *splits):
            overrides[key] = None
    if config.get("fewshot_config") and not fewshot_split(config):
        overrides["fewshot_config"] = None
    overrides["custom_dataset"] = lambda **_: DatasetDict(splits)
    return overrides, lines


def seed_generators(seed: int = 0) -> None:
    """Seed the generators of Python, NumPy and torch: ``seed`` is added to lm-eval's defaults."""
    random.seed(seed)
    np.random.seed((1234 + seed) % 2**32)
    torch.manual_seed(1234 + seed)


def _unknown_metric(spec: TaskSpec, metric: str) -> DataError:
    """Return the error for a metric or aggregation that lm-eval lacks."""
    return DataError(
        f"{spec.name}: {spec.definition}: metric_list: {metric}: lm-eval does not know this metric "
        f"or its aggregation; it has {', '.join(sorted(METRIC_REGISTRY))}; for a metric of your "
        "own function state its aggregation, such as mean"
    )


def _digest(task: ConfigurableTask, answers: AnswerSettings | None = None) -> str:
    """Return the SHA-256 of the definition (functions by their source), every evaluated document,
    the documents of few-shot examples if any are shown, and the settings ``answers``."""
    left_out = ORIGIN_KEYS if task.config.num_fewshot else {*ORIGIN_KEYS, "fewshot_config"}
    config = {key: value for key, value in task.dump_config().items() if key not in left_out}
    total = hashlib.sha256(json.dumps(config, sort_keys=True, default=_written).encode())
    documents = list(task.eval_docs)
    if task.config.num_fewshot:
        documents += list(task.sampler.df)
    if answers is not None:
        documents.append(asdict(answers))
    encode = json.JSONEncoder(sort_keys=True, default=_written).encode
    for document in documents:
        total.update(encode(document).encode())
    return total.hexdigest()


def _written(value: Any) -> str:
    """Return ``value`` as text for JSON, the same in every process: functions by their source
    instead of their address."""
    if callable(value):
        try:
            return inspect.getsource(value)
        except (OSError, TypeError):
            return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


@functools.lru_cache(maxsize=KEPT)
def check_documents(task: LoadedTask, limit: int | None = None) -> None:
    """Raise DataError if one of the first ``limit`` documents (None: all) cannot be scored. Its
    prompt prints a field that is null, [] or {}; its prompt or answer cannot be computed; it has no
    target text; or its label is missing, hidden (−1) or none of the choices. If the task has a
    ``process_results`` of its own, choices and labels are not checked."""
    problems = []
    documents = list(itertools.islice(task.task.eval_docs, limit))
    for number, document in enumerate(documents):
        if (problem := _problem(task.task, document)) is not None:
            problems.append((number, problem))
    if problems:
        number, problem = problems[0]
        more = f" ({len(problems)} of {len(documents)} documents have such a problem)"
        raise DataError(
            f"{task.name}: {task.location(number)}: {problem}{more if len(problems) > 1 else ''}; "
            "correct it, leave the document out, or use a split whose answers are public"
        )


def _problem(task: Any, document: dict[str, Any]) -> str | None:
    """Return why a document cannot be scored (empty field, no target, label outside the choices);
    None if it can."""
    for name in ("doc_to_text", "doc_to_target"):
        template, of_target = getattr(task.config, name, None), name == "doc_to_target"
        if not isinstance(template, str) or (of_target and task.OUTPUT_TYPE == "multiple_choice"):
            continue
        rolling = of_target and task.OUTPUT_TYPE == "loglikelihood_rolling"
        # A field that is printed as it is: null, [] and {} would be printed as Python does
        for field_ in [template] if template in document else printed(template):
            if field_ not in document:
                continue
            value = document[field_]
            if value is None or value == [] or value == {}:
                return f"{field_} is {json.dumps(value)}, so there is nothing to ask"
            if rolling and not (isinstance(value, str) and value.strip()):
                return f"{field_} is {json.dumps(value)[:40]}, but must be a text to score"
    try:
        if isinstance(task.config.doc_to_text, str):
            task.doc_to_text(document)
        target = (task.doc_to_text if task.multiple_input else task.doc_to_target)(document)
        if task.OUTPUT_TYPE != "multiple_choice":
            # Nothing but space is an answer that may be generated, and none that can be scored.
            scored = task.OUTPUT_TYPE != "generate_until" and isinstance(target, str)
            blank = target is None or target == [] or (scored and not target.strip())
            return "there is no target text" if blank else None
        choices = task.doc_to_choice(document)
    except Exception as error:  # of a definition's own template or function
        return (
            f"its prompt or answer cannot be computed ({type(error).__name__}: {first_line(error)})"
        )
    if callable(task.config.process_results):
        return None
    texts = isinstance(choices, list | tuple) and all(isinstance(c, str) for c in choices)
    if not choices or not texts:
        return f"its choices are {choices!r:.80}, not texts"
    # A definition's function may make an answer of anything: `first if label == 0 else second`.
    for name in (*INDEXES, *TEXTS):
        answer = document.get(name, 0)
        missing = answer in (None, "") or (name in INDEXES and answer == "-1")
        if name in INDEXES and isinstance(answer, int | float):
            missing = not answer >= 0 or answer % 1 != 0  # hidden from the public; NaN is not >= 0
        if missing:
            return f"{name} {answer!r} is not an answer"
    for gold in target if isinstance(target, list) and target else [target]:
        if isinstance(gold, str):
            usable = gold in choices
        else:  # of a column of whole numbers with one that is missing, a float
            is_index = gold.is_integer() if isinstance(gold, float) else isinstance(gold, int)
            usable = is_index and 0 <= gold < len(choices)
        if not usable:
            return (
                f"label {gold!r:.80} names none of its {len(choices)} choices "
                f"(0 to {len(choices) - 1}, or the text of one)"
            )
    return None


# in the order of RESPONSE_COLUMNS
RESPONSE_DTYPES = ("str", "int64", "int64", "float64", bool, object, object, "int64")
Response = tuple[str, int, int, float, bool, str | None, str | None, int]
NUMBERS = (bool, int, float, np.number, np.bool_)
ALL_ANSWERS = {"TakeKFilter", "MajorityVoteFilter", "CustomFilter"}  # take all drawn answers


@dataclass(slots=True)
class _Sample:
    """One document under one of the task's filters."""

    document: int
    filter: str
    resps: list[list[Any]]  # per request its answers, several if it is repeated
    filtered: list[Any]
    metrics: dict[str, Any]
    variances: dict[str, float] = field(default_factory=dict)  # of metrics, if answers are drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcomes:
    """The scores of one task, or of a whole cell, and the tables behind them (see
    ``qbench.records``).
    """

    outcomes: pd.DataFrame
    responses: pd.DataFrame
    scores: tuple[Score, ...]


Instances = dict[str, list[Any]]  # lm-eval's, by their kind


def prepare(model: Scorer | HFLMScorer, task: LoadedTask, settings: ScoringSettings) -> Instances:
    """Return the task's requests, each as often as it repeats, after a Scorer has encoded and
    planned them; {} for a task of answers, which ``answers`` builds. Raises DataError as
    ``check_documents``, EvaluationError for requests that cannot be built or encoded."""
    if task.answers is not None:
        return {}
    check_documents(task, settings.limit)
    build_requests(task.task, settings, model)
    kinds: Instances = defaultdict(list)
    for instance in task.task.instances:
        kinds[instance.request_type] += [instance] * instance.repeats
    if hasattr(model, "prepare"):
        for kind, instances in kinds.items():
            model.prepare(kind, instances)
    return kinds


def shared_samples(tasks: Sequence[LoadedTask], sample: int) -> dict[str, int]:
    """Return of how many documents of each task fast scores are compared with exact ones at first:
    tasks whose prompts are made by one template, as those of MMLU's subjects, share ``sample``, but
    no task has fewer than ``LEAST_SAMPLE``."""

    def template(task: LoadedTask) -> tuple[str, ...]:
        config = task.task.config
        parts = (config.doc_to_text, config.doc_to_choice, config.doc_to_target, config.num_fewshot)
        return task.task.OUTPUT_TYPE, *map(str, parts)

    alike = Counter(map(template, tasks))
    return {t.name: max(LEAST_SAMPLE, -(-sample // alike[template(t)])) for t in tasks}


def in_turn(
    model: Scorer | HFLMScorer,
    tasks: Sequence[LoadedTask],
    settings: ScoringSettings,
    score: Callable[[LoadedTask, Callable[[], Instances]], Callable[[], T] | None],
) -> Iterator[tuple[LoadedTask, Future[T]]]:
    """Yield tasks with the futures of their results. ``score`` takes a task and a function that
    waits for its requests and returns one that waits for the answers and judges them, or None.
    While a task is scored, threads judge the one before and prepare the next, unless one of them
    may draw at random."""
    with ThreadPoolExecutor(1) as before, ThreadPoolExecutor(1) as after:
        ready: Future[Instances] | None = None
        judged: Future[T] | None = None
        for task, following in zip(tasks, [*tasks[1:], None], strict=True):
            has_code = getattr(task.task, "has_code", True)
            requests = ready or before.submit(prepare, model, task, settings)
            draws = has_code or task.answers or task.task.OUTPUT_TYPE == "generate_until"
            ready = None
            if following is not None and not draws:
                ready = before.submit(prepare, model, following, settings)
            if draws and judged is not None:  # an answer is counted and observed at once
                judged.exception()
            work = score(task, requests.result)
            if work is not None:
                judged = after.submit(work)
                if has_code:
                    judged.exception()
                yield task, judged


def ask(model: Scorer | HFLMScorer, task: LoadedTask, kinds: Instances) -> Callable[[], None]:
    """Have ``model`` answer the requests ``kinds`` of ``task``, those of each kind together. Return
    a function that waits for the answers, if a GPU is still at work, and appends each to the
    ``resps`` of its lm-eval instance. Either raises EvaluationError if the model fails."""

    def start(kind: str, requests: list[Any]) -> Callable[[], list[Any]]:
        if hasattr(model, "start"):
            return model.start(kind, requests)
        return functools.partial(list, getattr(model, kind)(requests))

    hflm = getattr(model, "hflm", None)
    usual = getattr(hflm, "_max_length", None)
    if hflm is not None and task.max_length is not None:  # of prompts and answers
        hflm._max_length = task.max_length
    try:
        begun = [(requests, start(kind, requests)) for kind, requests in kinds.items()]
    finally:
        if hflm is not None:
            hflm._max_length = usual

    def wait() -> None:
        for requests, answers in begun:
            for answer, request in zip(answers(), requests, strict=True):
                request.resps.append(answer)

    return wait


def judge(task: LoadedTask, settings: ScoringSettings) -> Outcomes:
    """Return scores and tables of the answers that ``ask`` stored. Raises EvaluationError if
    lm-eval or the task's code cannot judge them, or if a log-likelihood or a score is not a number.
    """
    with _named(
        task.name, "its answers cannot be scored", "correct the definition, or leave the task out"
    ):
        samples = list(_samples(task.task, settings.limit))
    # Of a metric with two numbers per document they are value and weight: a value and its
    # weight, or right answer and prediction (see compare.count_flips). Of drawn answers the
    # variances are added
    rows = []
    for sample in samples:
        for metric, value in sample.metrics.items():
            name = _name(metric, sample.filter)
            of_two = isinstance(value, (list, tuple)) and len(value) == 2
            number, weight = value if of_two else (value, 1.0)
            if isinstance(number, NUMBERS) and isinstance(weight, NUMBERS):
                rows.append((task.name, sample.document, name, float(number), float(weight)))
            if metric in sample.variances:
                name, value = variance_name(name), sample.variances[metric]
                rows.append((task.name, sample.document, name, value, 1.0))
    outcomes = pd.DataFrame(rows, columns=list(OUTCOME_COLUMNS)).astype({"document": "int64"})
    scores = tuple(_scores(task, samples, outcomes))
    responses = _responses(task.name, samples)
    likelihoods = responses[responses["answer"].isna()]  # texts have none
    bad = ~np.isfinite(likelihoods["log_likelihood"].to_numpy(dtype=float))
    if bad.any():
        raise EvaluationError(
            f"{task.name}: {int(bad.sum())} of {len(bad)} log-likelihoods are not numbers, the "
            f"first in document {int(likelihoods['document'].to_numpy()[bad][0])}; the model gives "
            "NaN or infinite logits there, in any scoring mode; try another compute_dtype, or "
            "leave the cell out"
        )
    for score in scores:
        if math.isnan(score.value):
            raise EvaluationError(
                f"{task.name}: {score.metric} is not a number; leave this metric out of metric_list"
            )
    return Outcomes(scores=scores, outcomes=outcomes, responses=responses)


@contextmanager
def _named(task: str, what: str, remedy: str) -> Iterator[None]:
    """Turn exceptions in the body, from lm-eval's or the task's code, into an EvaluationError that
    begins with ``task`` and ``what`` and ends in ``remedy``."""
    try:
        yield
    except QbenchError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise EvaluationError(f"{task}: {what} ({why}); {remedy}") from error


def build_ahead(
    tasks: Sequence[LoadedTask],
    settings: ScoringSettings,
    encode: Callable[[list[tuple[str, str]]], Any] | None = None,
) -> None:
    """Build the requests of tasks that draw nothing at random and need no chat template, so that
    ``build_requests`` has them ready. ``encode`` is called with the texts of those for
    log-likelihoods, task by task, as many as are kept; a longer task is left out."""
    left = KEPT_CHARACTERS
    for task in tasks:
        if settings.chat is None and getattr(task.task, "draws_nothing", False):
            task.task.build_all_requests(limit=settings.limit, rank=0, world_size=1)
            kind = "loglikelihood"  # these ``ask`` puts together
            pairs = [each.args for each in task.task.instances if each.request_type == kind]
            if encode is not None and 0 < (size := characters(pairs)) <= left:
                left -= size
                encode(pairs)


def build_requests(task: Any, settings: ScoringSettings, model: Any = None) -> None:
    """Build the ``instances`` of an lm-eval task as its ``simple_evaluate`` does. ``settings.seed``
    is added to lm-eval's seeds. ``model`` is the scorer whose chat template ``settings.chat``
    needs; without ``chat`` it may be None. Raises EvaluationError if a system role is needed and
    the template has none, or if the template fails."""
    seed_generators(settings.seed)
    TaskManager(include_defaults=False).load([task])  # asks for its name, which draws each time
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=settings.fewshot_seed)
    chat: dict[str, Any] = asdict(settings.chat) if settings.chat else {}
    if settings.chat and settings.chat.apply_chat_template:
        render = functools.partial(_render, model.hflm if hasattr(model, "hflm") else model.model)
        _require_system_role(render, task, settings.chat.system_instruction)
        chat["chat_template"] = render
    task.build_all_requests(limit=settings.limit, rank=0, world_size=1, **chat)


def _render(model: Any, turns: list[dict[str, str]], **options: Any) -> str:
    """Return ``turns`` as text by the chat template. Raises EvaluationError if it cannot."""
    try:
        return model.apply_chat_template(turns, **options)
    except Exception as error:  # whatever a template raises
        raise EvaluationError(
            f"the checkpoint's chat template cannot render a prompt: {first_line(error)}; correct "
            "the template, or leave evaluation.apply_chat_template out"
        ) from error


def _require_system_role(render: Callable[..., str], task: Any, instruction: str | None) -> None:
    """Raise EvaluationError if the template has no system role, but there is a system instruction
    or a task description: lm-eval would leave them out with a warning."""
    name, text, remedy = "evaluation.system_instruction", instruction, "leave it out"
    if text is None:
        document = next(iter(task.eval_docs), {})
        name, text = f"{task.config.task}: description", task.resolve_field(
            document, task.config.description
        )  # fmt: skip
        remedy = "put the description into the task's doc_to_text"
    text = str(text or "").strip()
    turns = [{"role": "system", "content": text}, {"role": "user", "content": "?"}]
    if text and text not in render(turns):
        raise EvaluationError(f"{name}: the model's chat template has no system role; {remedy}")


def rebuild_requests(
    record: Record, specs: Sequence[TaskSpec], documents: int, task: str | None = None
) -> dict[str, dict[int, Question]]:
    """Return task → document → its prompt texts and right answer, for the first ``documents`` of
    all ``specs``, or of ``task`` alone.

    Records do not keep prompts; they are made again from the recipe and its data. Left out: tasks
    that the record lacks, and prompts that depend on a tokenizer (conversations, prompts of a
    length in tokens). Raises DataError if recipe or data differ from those that the record's cell
    scored.
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
    """Return the right answer: the (first) right choice's index, or a text; None without either."""
    if task.OUTPUT_TYPE not in ("multiple_choice", "generate_until"):
        return None
    with suppress(Exception):  # the task's code may raise; this is only for display
        gold = (task.doc_to_text if task.multiple_input else task.doc_to_target)(document)
        if task.OUTPUT_TYPE == "generate_until":
            return gold if isinstance(gold, str) else " | ".join(map(str, gold))
        gold = gold[0] if isinstance(gold, list) and gold else gold
        gold = task.doc_to_choice(document).index(gold) if isinstance(gold, str) else gold
        return gold if isinstance(gold, int) and gold >= 0 else None
    return None


def _samples(task: Any, limit: int | None) -> Iterator[_Sample]:
    """Yield a sample per document and filter with its metrics. With several drawn answers metrics
    are means, with their variances, unless a filter joins the answers."""
    drawn = (task.config.generation_kwargs or {}).get("do_sample")
    filters = [part for ensemble in task._filters for part in ensemble.filters]
    names = {getattr(part, "func", part).__name__ for part in filters}
    repeats = task.instances[0].repeats
    if repeats < 2 or task.OUTPUT_TYPE != "generate_until" or not drawn or names & ALL_ANSWERS:
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
            if isinstance(value, NUMBERS)
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


def _judged(task: Any, limit: int | None) -> Iterator[_Sample]:
    """Yield a sample per document and filter, with lm-eval's metrics."""
    task.apply_filters()
    requests: dict[int, list[Any]] = defaultdict(list)
    for instance in task.instances:
        requests[instance.doc_id].append(instance)
    for instances in requests.values():
        instances.sort(key=attrgetter("idx"))
    for name in task.instances[0].filtered_resps:
        for number, document in task.doc_iterator(rank=0, limit=limit, world_size=1):
            instances = requests[number]
            filtered = [instance.filtered_resps[name] for instance in instances]
            metrics = task.process_results(document, filtered)
            yield _Sample(
                number, name, [instance.resps for instance in instances], filtered, metrics
            )


def _scores(
    task: LoadedTask, samples: Sequence[_Sample], outcomes: pd.DataFrame
) -> Iterator[Score]:
    """Yield a score per metric and filter, aggregated by lm-eval over ``samples``."""
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
        remedy = "leave this metric out of metric_list"
        with _named(task.name, f"{name} cannot be computed", remedy):
            try:
                value = aggregate(values)
            except OverflowError:
                if aggregation not in LOG_SCALE:
                    raise
                value = math.inf  # a perplexity beyond the largest double
        if not isinstance(value, int | float | np.number):
            continue
        column, stderr = outcomes["value"][outcomes["metric"] == name], None
        if len(column) > 1 and aggregation in ("mean", "perplexity"):
            stderr = float(column.std(ddof=1)) / math.sqrt(len(column))
            if aggregation == "perplexity":  # the delta method, which lm-eval's bootstrap estimates
                stderr *= perplexity(-fmean(column))
        yield Score(
            task=task.name,
            label=task.label,
            metric=name,
            value=float(value),
            stderr=stderr,
            higher_is_better=bool(task.task.higher_is_better().get(metric, True)),
            aggregation=aggregation,
            documents=documents,
        )


def group_scores(groups: Sequence[TaskGroup], scores: Sequence[Score]) -> tuple[GroupScore, ...]:
    """Return a score per metric and filter of each of ``groups``, by lm-eval's arithmetic. Groups
    of which a task has no scores are left out. The standard error is None if a task has none."""
    scored = []
    for group in groups:
        by_task = {task: {s.metric: s for s in scores if s.task == task} for task in group.tasks}
        if not all(by_task.values()):
            continue
        metrics = dict.fromkeys(metric for of in by_task.values() for metric in of)
        for of_group in group.metrics:
            names = [metric for metric in metrics if base_metric(metric) == of_group.metric]
            if of_group.filters is not None:
                names = [_name(of_group.metric, filter_) for filter_ in of_group.filters]
            for metric in names:
                members = [of[metric] for of in by_task.values() if metric in of]
                if not members:
                    continue
                by_size, stderr = of_group.weight_by_size, None
                sizes = [score.documents for score in members]
                errors = [score.stderr for score in members if score.stderr is not None]
                if len(errors) == len(members):
                    pooled = pooled_sample_stderr(errors, sizes) if by_size else (
                        unweighted_mean_stderr(errors))  # fmt: skip
                    stderr = float(pooled)
                scored.append(
                    GroupScore(
                        group=group.name,
                        label=group.label,
                        metric=metric,
                        value=aggregate_subtask_metrics([s.value for s in members], sizes, by_size),
                        stderr=stderr,
                        higher_is_better=members[0].higher_is_better,
                        weight_by_size=by_size,
                        documents=sum(sizes),
                        tasks=tuple(score.task for score in members),
                    )
                )
    return tuple(scored)


def _name(metric: str, filter_: str) -> str:
    """Return the metric's name, with the filter in brackets unless it is lm-eval's ``none``."""
    return metric if filter_ == "none" else f"{metric} [{filter_}]"


def _responses(task: str, samples: Sequence[_Sample]) -> pd.DataFrame:
    """Return log-likelihoods and texts as a table with the columns ``RESPONSE_COLUMNS``: a row per
    answer of the model, and one per text that a filter changed, by filter, document and request."""
    rows: list[Response] = []
    for sample in samples:
        for request, answers in enumerate(sample.resps):
            if sample.filter != samples[0].filter:
                break
            for repeat, answer in enumerate(answers):
                if isinstance(answer, str):
                    place = sample.document, request * len(answers) + repeat
                    rows.append(text_response(task, *place, None, answer))
                elif repeat == 0:
                    value, greedy = answer if isinstance(answer, (list, tuple)) else (answer, False)
                    number = float(value), bool(greedy)
                    rows.append((task, sample.document, request, *number, None, None, 0))
        for request, (taken, answers) in enumerate(zip(sample.filtered, sample.resps, strict=True)):
            if isinstance(answers[0], str) and taken != answers[0]:
                text = taken if isinstance(taken, str) else json.dumps(taken, default=str)
                place = sample.document, request * len(answers)
                rows.append(text_response(task, *place, sample.filter, text))
    return response_table(rows)


def response_table(rows: Sequence[Response]) -> pd.DataFrame:
    """Return ``rows``, such as ``text_response`` gives, as a table with the columns
    ``RESPONSE_COLUMNS``."""
    columns = zip(*rows, strict=True) if rows else [()] * len(RESPONSE_COLUMNS)
    parts = zip(RESPONSE_COLUMNS, columns, RESPONSE_DTYPES, strict=True)
    return pd.DataFrame({name: pd.Series(part, dtype=dtype) for name, part, dtype in parts})


def text_response(
    task: str, document: int, request: int, filter_: str | None, text: str
) -> Response:
    """Return the row of ``response_table`` for a generated text, cut to ``ANSWER_CHARACTERS``; its
    last field counts the characters that were cut. ``request``: index among the document's answers.
    ``filter_``: lm-eval's filter that made the text; None: the text as the model wrote it."""
    kept = text[:ANSWER_CHARACTERS].encode(errors="replace").decode()  # Parquet is UTF-8
    return (task, document, request, math.nan, False, kept, filter_, len(text) - len(kept))
