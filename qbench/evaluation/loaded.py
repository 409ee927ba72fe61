"""Make lm-eval's task objects of planned tasks, with the same data, and check their documents:
lm-eval would count those without a usable answer as wrong.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import random
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from jinja2 import Template, UndefinedError
from lm_eval import utils
from lm_eval.api.registry import METRIC_REGISTRY, get_metric_aggregation
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from qbench import hub
from qbench.errors import DataError, first_line
from qbench.evaluation.definitions import missing_module, read_definition
from qbench.evaluation.settings import AnswerSettings
from qbench.evaluation.tasks import (
    TaskSpec,
    evaluation_split,
    fewshot_split,
    is_hidden,
    no_text,
    prompt_fields,
    read_rows,
)

SPLIT_KEYS = ("training_split", "validation_split", "test_split", "fewshot_split")
# Where documents come from, which is not what is asked about them.
ORIGIN_KEYS = {"custom_dataset", "dataset_kwargs", "metadata", "tag", *SPLIT_KEYS}
TEMPLATES = ("doc_to_text", "doc_to_target", "doc_to_choice", "process_results")
KEPT = 256  # tasks in memory
INDEXES = ("label", "gold")  # usual names of the field that says which choice is right
TEXTS = ("answerKey", "answer")  # and of those that say it in words


class TemplateTask(ConfigurableTask):
    """lm-eval's task without repeated work; its prompts are the same.

    lm-eval compiles a Jinja template anew for every document and every question about it, 0.5 ms
    each and 16,000 times for ARC-easy; here each is compiled once. Zero-shot requests are built
    once for all models of a process, unless the definition's own code changes them: that saves 0.3
    s a cell of ARC-easy.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._compiled: dict[str, Template] = {}
        self._built: dict[str, Any] | None = None
        super().__init__(config={key: value for key, value in config.items() if key != "class"})
        self._coded = any(callable(getattr(self.config, name)) for name in TEMPLATES)

    def doc_to_text(self, doc: Any, doc_to_text: Any = None) -> Any:
        return super().doc_to_text(doc, self._function("doc_to_text", doc_to_text, self._text))

    def doc_to_target(self, doc: Any, doc_to_target: Any = None) -> Any:
        return super().doc_to_target(
            doc, self._function("doc_to_target", doc_to_target, self._target)
        )

    def doc_to_choice(self, doc: Any, doc_to_choice: Any = None) -> Any:
        return super().doc_to_choice(
            doc, self._function("doc_to_choice", doc_to_choice, ast.literal_eval)
        )

    def build_all_requests(self, **settings: Any) -> None:
        if self._coded or self.config.num_fewshot or self._built != settings:
            super().build_all_requests(**settings)
            self._built = settings
        for instance in self.instances:
            instance.resps, instance.filtered_resps = [], {}

    def _function(self, name: str, override: Any, read: Callable[[str], Any]) -> Any:
        """Return a function that renders a compiled template and reads the result as lm-eval does;
        what is ``stated`` if it is no template.
        """
        template = getattr(self.config, name) if override is None else override
        if self.prompt is not None or not isinstance(template, str) or template in self.features:
            return override
        if template not in self._compiled:
            self._compiled[template] = utils.env.from_string(template)
        compiled = self._compiled[template]
        return lambda doc: read(compiled.render(**doc))

    def _text(self, rendered: str) -> Any:
        number = rendered.isdigit() and self.config.doc_to_choice is not None
        return ast.literal_eval(rendered) if number else rendered

    def _target(self, rendered: str) -> Any:
        if len(rendered) >= 2 and rendered[0] == "[" and rendered[-1] == "]":
            with contextlib.suppress(SyntaxError, ValueError):
                return ast.literal_eval(rendered)
        return self._text(rendered)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedTask:
    """A task with its documents in memory."""

    name: str
    label: str
    task: ConfigurableTask
    digest: str  # of what is asked and of its documents, wherever they came from
    max_length: int | None = None  # in place of the cell's, for prompts of a length of their own
    lines: tuple[tuple[Path, int], ...] = ()  # file and line of each document, where it has one
    answers: AnswerSettings | None = None  # of the task ``ANSWERS``

    def location(self, document: int) -> str:
        """Return where a document stands, for messages: file and line, or its number."""
        if self.lines:
            path, line = self.lines[document]
            return f"{path}:{line}"
        return f"document {document}"

    @property
    def kind(self) -> str:
        """Return lm-eval's ``output_type``."""
        return self.task.OUTPUT_TYPE


@functools.lru_cache(maxsize=KEPT)
def load_task(spec: TaskSpec, tokenizer: Path | None = None) -> LoadedTask:
    """Return lm-eval's object of ``spec``; the same one each time that a process asks.

    ``tokenizer`` is the folder of the checkpoint's, for a definition that sizes its prompts by it
    (``spec.needs_tokenizer``).

    Raises DataError where definition or data are no longer those that were planned, or where
    lm-eval cannot use them.
    """
    config = read_definition(spec.definition).config
    config["num_fewshot"] = spec.num_fewshot
    overrides, lines = _overrides(spec, config)
    if tokenizer is not None:
        metadata = config.get("metadata") or {}
        overrides["metadata"] = {**metadata, "tokenizer": str(tokenizer)}
    try:
        _require_aggregations(spec, config)
        task = _build(spec, overrides)
    except DataError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None:
            raise
        raise DataError(f"{spec.name}: {missing_module(error.name)}") from error
    except Exception as error:
        raise DataError(_reason(spec, config, error)) from error
    if read_definition(spec.definition).digest != spec.definition_digest:
        raise DataError(
            f"{spec.name}: its definition, {spec.definition} or the code beside it, changed "
            "after this run began; run again"
        )
    if spec.hub_data is not None:
        _require_commit(spec, task)
    _require_metrics(spec, task)
    _require_examples(spec, task)
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
    """Return what replaces parts of the definition, and file and line of each evaluated row."""
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
        splits[file.split] = Dataset.from_list(fields)
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
    """Seed Python, NumPy and torch, counted from lm-eval's own seeds."""
    random.seed(seed)
    np.random.seed((1234 + seed) % 2**32)
    torch.manual_seed(1234 + seed)


def _build(spec: TaskSpec, overrides: dict[str, Any]) -> ConfigurableTask:
    """Return lm-eval's task object, made by its task manager from the definition itself: its index
    of all definitions would take twenty seconds.
    """
    config = load_yaml(spec.definition)
    if callable(process := config.get("process_docs")):
        # lm-eval asks for processed documents again and again: of data in memory, a definition that
        # draws would make other ones each time, so that answers met other choices than were asked.
        overrides = {**overrides, "process_docs": functools.cache(process)}
    # As lm-eval does before it builds tasks: some shuffle their choices meanwhile (gpqa).
    seed_generators()
    definition = {"class": TemplateTask, **config, **overrides}
    (task,) = TaskManager(include_defaults=False).load([definition])["tasks"].values()
    return task


def _reason(spec: TaskSpec, config: dict[str, Any], error: Exception) -> str:
    if hub.is_hub_error(error):
        return (
            f"{spec.name}: the hub did not give its data: {hub.reason(error)}; or put the data "
            f"into DIR/{spec.name}/{evaluation_split(config)}.jsonl and add --data DIR"
        )
    line = f"{spec.name}: {spec.definition}: {type(error).__name__}: {first_line(error)}"
    if spec.files and isinstance(error, (KeyError, UndefinedError)):
        return f"{line}; are the fields of its data those that it needs?"
    return line


def _require_examples(spec: TaskSpec, task: ConfigurableTask) -> None:
    """Raises DataError if fewer documents are there than examples are drawn. lm-eval draws one more
    where it leaves out the document that is asked about."""
    count = task.config.num_fewshot or 0
    needed = count + (task.fewshot_cfg.split == task.config.test_split)
    if count and (documents := len(task.sampler.df)) < needed:
        raise DataError(
            f"{spec.name}: num_fewshot {count}: there are {documents} documents to draw examples "
            f"from, {needed} are needed; lower num_fewshot"
        )


def _require_metrics(spec: TaskSpec, task: ConfigurableTask) -> None:
    """Raise DataError for a metric that lm-eval does not know and would leave out."""
    own_function = callable(task.config.process_results)
    for metric, aggregate in task.aggregation().items():
        if aggregate is None or not (own_function or task._metric_fn_list.get(metric, True)):
            raise _unknown_metric(spec, metric)


def _require_aggregations(spec: TaskSpec, config: dict[str, Any]) -> None:
    """Raise DataError for a metric without an aggregation, stated or known to lm-eval."""
    for entry in config.get("metric_list") or ():
        if isinstance(entry, dict) and "aggregation" not in entry:
            metric = entry.get("metric")
            if isinstance(metric, str) and get_metric_aggregation(metric) is None:
                raise _unknown_metric(spec, metric)


def _unknown_metric(spec: TaskSpec, metric: str) -> DataError:
    return DataError(
        f"{spec.name}: {spec.definition}: metric_list: {metric}: lm-eval does not know this metric "
        f"or its aggregation; it has {', '.join(sorted(METRIC_REGISTRY))}; for one that a function "
        "of your own makes, state its aggregation, such as mean"
    )


def _require_commit(spec: TaskSpec, task: ConfigurableTask) -> None:
    """Raise DataError if datasets took another commit's copy, as it does without the hub."""
    assert spec.hub_data is not None
    for split in task.dataset.values():
        for file in split.cache_files:
            if spec.hub_data.commit not in Path(file["filename"]).parts:
                raise DataError(
                    f"{spec.name}: {spec.hub_data.repository} was planned at commit "
                    f"{spec.hub_data.commit[:12]}, but another copy was loaded "
                    f"({file['filename']}); run again where the hub can be reached"
                )


def _digest(task: ConfigurableTask, answers: AnswerSettings | None = None) -> str:
    """Return the SHA-256 of the definition (functions by their source), every evaluated document,
    if examples are shown every document that they are drawn from, and how ``answers`` are made.
    """
    left_out = ORIGIN_KEYS if task.config.num_fewshot else {*ORIGIN_KEYS, "fewshot_config"}
    config = {key: value for key, value in task.dump_config().items() if key not in left_out}
    total = hashlib.sha256(json.dumps(config, sort_keys=True, default=_written).encode())
    documents = list(task.eval_docs)
    if task.config.num_fewshot:
        documents += list(task.sampler.df)
    if answers is not None:
        documents.append(asdict(answers))
    for document in documents:
        total.update(json.dumps(document, sort_keys=True, default=_written).encode())
    return total.hexdigest()


def _written(value: Any) -> str:
    """Return text for what JSON cannot hold, the same in every process: functions by their source,
    not by their address.
    """
    if callable(value):
        try:
            return inspect.getsource(value)
        except (OSError, TypeError):
            return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


@functools.lru_cache(maxsize=KEPT)
def check_documents(task: LoadedTask, limit: int | None = None) -> None:
    """Raises DataError where one of the first ``limit`` documents of ``task`` asks nothing or has
    no right answer. Its label may be missing, hidden (−1) or name none of the choices.

    Tasks with a ``process_results`` of their own judge by their own rules and are only checked
    for targets that cannot be made at all.
    """
    problems = []
    documents = list(itertools.islice(task.task.eval_docs, limit))
    for number, document in enumerate(documents):
        if (problem := _problem(task.task, document)) is not None:
            problems.append((number, problem))
    if problems:
        number, problem = problems[0]
        more = f" ({len(problems)} of {len(documents)} documents are like it)"
        raise DataError(
            f"{task.name}: {task.location(number)}: {problem}{more if len(problems) > 1 else ''}; "
            "correct it, leave the document out, or use a split whose answers are public"
        )


def _problem(task: Any, document: dict[str, Any]) -> str | None:
    for name in ("doc_to_text", "doc_to_target"):
        template, target = getattr(task.config, name, None), name == "doc_to_target"
        if not isinstance(template, str) or (target and task.OUTPUT_TYPE == "multiple_choice"):
            continue
        rolling = target and task.OUTPUT_TYPE == "loglikelihood_rolling"
        if reason := no_text(template, document, text=rolling):
            return reason
    try:
        target = (task.doc_to_text if task.multiple_input else task.doc_to_target)(document)
        if task.OUTPUT_TYPE != "multiple_choice":
            # Nothing but space is an answer that may be generated, and none that can be scored.
            scored = task.OUTPUT_TYPE != "generate_until" and isinstance(target, str)
            blank = target is None or target == [] or (scored and not target.strip())
            return "there is no target text" if blank else None
        choices = task.doc_to_choice(document)
    except Exception as error:  # of a definition's own template or function
        return f"its answer cannot be found ({type(error).__name__}: {first_line(error)})"
    if callable(task.config.process_results):
        return None
    if not choices or not all(isinstance(choice, str) for choice in choices):
        return f"its choices are {choices!r:.80}, not texts"
    # A definition's function may make an answer of anything: `first if label == 0 else second`.
    for name in (*INDEXES, *TEXTS):
        answer = document.get(name, 0)
        if answer in (None, "") or (name in INDEXES and is_hidden(answer)):
            return f"{name} {answer!r} is no answer"
    golds = target if isinstance(target, list) and target else [target]
    for gold in golds:
        if not _names(gold, choices):
            return (
                f"label {gold!r:.80} names none of its {len(choices)} choices "
                f"(0 to {len(choices) - 1}, or the text of one)"
            )
    return None


def _names(gold: Any, choices: list[str]) -> bool:
    """Return whether ``gold`` is the index of a choice, or its text."""
    if isinstance(gold, str):
        return gold in choices
    if isinstance(gold, float):  # a column of whole numbers with one that is missing
        return gold.is_integer() and 0 <= gold < len(choices)
    return isinstance(gold, int) and 0 <= gold < len(choices)
