"""A task: its definition and data found and digested (``plan_task``, no torch), and lm-eval's
object of it with the very data that was planned (``load_task``).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench import hub
from qbench.errors import DataError, MissingDataError, RecipeError
from qbench.evaluation import passkey
from qbench.evaluation.definitions import (
    Definition,
    definition_file,
    missing_module,
    read_definition,
    require_modules,
)
from qbench.evaluation.settings import NUMPY_SEED, RANDOM_SEED, TORCH_SEED
from qbench.passkey import DOCUMENTS, task_length

if TYPE_CHECKING:
    from datasets import DatasetDict
    from lm_eval.api.task import ConfigurableTask


RENDERED = ("doc_to_text", "doc_to_target", "doc_to_choice")  # templates over a row's fields
BARE = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """One split's JSON Lines file; ``digest`` is the SHA-256 of its bytes."""

    split: str
    path: Path
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line's JSON object."""

    line: int  # counted from 1
    fields: dict[str, Any]


def read_rows(path: Path) -> tuple[list[Row], str]:
    """The rows of a JSON Lines file, and the SHA-256 of the very bytes that were parsed.

    Raises DataError with file and line.
    """
    try:
        payload = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    rows = []
    # not splitlines: a string in JSON may hold U+2028, which is no end of a line
    for number, line in enumerate(payload.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not JSON ({error})") from None
        if not isinstance(fields, dict):
            raise DataError(f"{path}:{number}: a JSON object is needed, this is {fields!r:.40}")
        rows.append(Row(line=number, fields=fields))
    if not rows:
        raise DataError(f"{path}: no documents in it")
    return rows, hashlib.sha256(payload).hexdigest()


def require_fields(name: str, definition: Definition, path: Path, rows: Sequence[Row]) -> None:
    """Raises DataError where a row lacks a field that the task's templates name, or has a label
    that nobody can meet. What the task computes with functions of its own is not looked at."""
    config = definition.config
    if config.get("process_docs") or config.get("use_prompt"):
        return
    source = config.get("dataset_path")
    for key in RENDERED:
        template = config.get(key)
        if isinstance(template, str):
            _require_template(f"{key} of {name}", template, path, rows, source)
    target = config.get("doc_to_target")
    if config.get("output_type") == "multiple_choice" and isinstance(target, str):
        bare = BARE.fullmatch(target.strip())
        _require_labels(name, bare[1] if bare else target, path, rows)


def _require_template(
    what: str, template: str, path: Path, rows: Sequence[Row], source: Any
) -> None:
    needed = {template} if template in rows[0].fields else _variables(template)
    for row in rows:
        missing = sorted(needed - row.fields.keys())
        if missing and not _renders(template, row.fields):
            raise DataError(
                f"{path}:{row.line}: no field {missing[0]!r}, which {what} needs; "
                f"are the fields those of {source}? this line has {', '.join(row.fields) or 'none'}"
            )


def _variables(template: str) -> set[str]:
    from jinja2 import TemplateSyntaxError, meta

    try:
        return meta.find_undeclared_variables(_environment().parse(template))
    except TemplateSyntaxError:
        return set()  # lm-eval says so


def _renders(template: str, fields: dict[str, Any]) -> bool:
    """Whether a template can do without what it names, as behind ``is defined``."""
    from jinja2 import UndefinedError

    try:
        _environment().from_string(template).render(**fields)
    except UndefinedError:
        return False
    return True


def _environment() -> Any:
    """As lm-eval renders: what is not there is an error, not an empty text."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["regex_replace"] = lambda text, pattern, new, count=0: re.sub(
        pattern, new, text, count=count
    )
    return environment


def _require_labels(name: str, field: str, path: Path, rows: Sequence[Row]) -> None:
    """Test sets are published with their labels hidden as −1 or null."""
    for row in rows:
        if field not in row.fields:
            return  # a template, or a fixed index among the choices
        label = row.fields[field]
        hidden = label is None or label == "-1" or isinstance(label, bool)
        number = isinstance(label, int | float) and not isinstance(label, bool)
        if hidden or (number and (label < 0 or label != int(label))):
            raise DataError(
                f"{path}:{row.line}: {name}: its label, {field}, is {json.dumps(label)}: missing "
                "or hidden; score a split whose labels are known"
            )


MAX_GEN_TOKS = 256  # lm-eval's, where a task states none
LOCAL_FORMATS = ("arrow", "csv", "json", "pandas", "parquet", "text")  # of datasets.load_dataset


@dataclass(frozen=True, kw_only=True, slots=True)
class HubData:
    """A data set of the hub at one commit."""

    repository: str
    name: str | None  # of its configuration
    commit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSpec:
    """A task with its definition and data found and digested; none of it is loaded.

    ``digest`` is of all that can change what is asked of a model: the definition with the code
    that it names, and the bytes of its local files or the commit of its data set.
    """

    name: str
    label: str  # as tables show it: the name, and what stands for its evaluation split if another
    definition: Path  # the YAML file
    definition_digest: str
    own: bool  # a definition of the user's, not lm-eval's
    stated_fewshot: int | None  # as the recipe says; None: as the definition says
    num_fewshot: int
    files: tuple[DataFile, ...]  # the evaluation split's first; none where the hub gives them
    hub_data: HubData | None
    documents: int | None  # None where only loading tells
    output_type: str
    max_gen_toks: int  # tokens that a generated answer may have

    @property
    def digest(self) -> str:
        data = [(file.split, file.digest) for file in self.files]
        parts = {
            "definition": self.definition_digest,
            "files": data,
            "hub": asdict(self.hub_data) if self.hub_data else None,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def plan_task(
    name: str,
    *,
    data: Path | None,
    definitions: Path | None,
    files: Sequence[str] | None = None,
    fewshot_files: Sequence[str] | None = None,
    num_fewshot: int | None = None,
) -> TaskSpec:
    """Find the leaf task ``name`` and its data, and check what can be checked unloaded.

    ``data`` is a folder of ``<task>/<split>.jsonl`` with the task's own field names, None means
    the hub; ``definitions`` a folder of further lm-eval task definitions, searched first.
    ``files`` are the stems that may stand for the evaluation split, ``fewshot_files`` those for
    the one that examples are drawn from; the first that exists is used.

    Raises RecipeError for an unknown task, DataError where its data cannot be had.
    """
    if task_length(name) is not None:
        return _passkey(name)
    path = definition_file(name, definitions)
    definition = read_definition(path)
    require_modules(name, definition)
    config = {**definition.config, "num_fewshot": definition.config.get("num_fewshot")}
    label = name
    if num_fewshot is not None:
        if num_fewshot != (config["num_fewshot"] or 0):
            label += f" ({num_fewshot}-shot)"
        config["num_fewshot"] = num_fewshot
    found, documents = _local_files(name, definition, config, data, files, fewshot_files)
    if others := _others(config, found):
        label += f" [{others}]"
    generation = config.get("generation_kwargs") or {}
    return TaskSpec(
        name=name,
        label=label,
        definition=path,
        definition_digest=definition.digest,
        own=definitions is not None and path.is_relative_to(definitions),
        stated_fewshot=num_fewshot,
        num_fewshot=config["num_fewshot"] or 0,
        files=found,
        hub_data=None if found else _hub_data(name, config),
        documents=documents,
        output_type=config.get("output_type", "generate_until"),
        max_gen_toks=int(generation.get("max_gen_toks", MAX_GEN_TOKS)),
    )


def _passkey(name: str) -> TaskSpec:
    """A task of our own, which needs no data."""
    from qbench.evaluation import passkey

    return TaskSpec(
        name=name,
        label=name,
        definition=Path(passkey.__file__),
        definition_digest=passkey.definition_digest(passkey.require_length(name)),
        own=False,
        stated_fewshot=None,
        num_fewshot=0,
        files=(),
        hub_data=None,
        documents=DOCUMENTS,
        output_type=passkey.KIND,
        max_gen_toks=passkey.DIGITS,
    )


def evaluation_split(config: dict[str, Any]) -> str | None:
    """The split that lm-eval scores: test, or validation where a task has no test split."""
    return config.get("test_split") or config.get("validation_split")


def fewshot_split(config: dict[str, Any]) -> str | None:
    """The split that a task's few-shot examples come from, None where it uses none."""
    if not config.get("num_fewshot"):
        return None
    own = config.get("fewshot_config") or {}
    if own.get("samples") is not None:
        return None
    return (
        own.get("split")
        or config.get("fewshot_split")
        or config.get("training_split")
        or config.get("validation_split")
        or config.get("test_split")
    )


def _local_files(
    name: str,
    definition: Definition,
    config: dict[str, Any],
    data: Path | None,
    files: Sequence[str] | None,
    fewshot_files: Sequence[str] | None,
) -> tuple[tuple[DataFile, ...], int | None]:
    """The files and the number of documents; nothing of them without a data folder."""
    if data is None:
        return (), None
    split, examples = evaluation_split(config), fewshot_split(config)
    if split is None or "class" in config:
        raise DataError(
            f"{name}: it is defined in Python and loads its data itself; run it without a data "
            "folder"
        )
    wanted = {split: tuple(files or (split,))}
    if examples and examples != split:
        wanted[examples] = tuple(fewshot_files or (examples,))
    elif examples and fewshot_files:
        raise RecipeError(
            f"tasks: {name}: files: its examples are drawn from {split}, which is scored; leave "
            "fewshot out"
        )
    elif fewshot_files:
        raise RecipeError(
            f"tasks: {name}: files: fewshot names a file, and the task shows no examples; say "
            "num_fewshot too, or leave it out"
        )
    paths = _paths(name, data / name, wanted, examples)
    found, documents = [], None
    for of, path in paths.items():
        rows, digest = read_rows(path)
        require_fields(name, definition, path, rows)
        found.append(DataFile(split=of, path=path, digest=digest))
        if of == split and not config.get("process_docs"):
            documents = len(rows)
    return tuple(found), documents


def _paths(
    name: str, folder: Path, wanted: dict[str, tuple[str, ...]], examples: str | None
) -> dict[str, Path]:
    """The file of each split. Raises MissingDataError, which names all that are not there."""
    present = sorted(path.stem for path in folder.glob("*.jsonl"))
    paths, missing = {}, []
    for split, stems in wanted.items():
        stem = next((stem for stem in stems if stem in present), None)
        if stem is None:
            missing.append((split == examples, stems))
        else:
            paths[split] = folder / f"{stem}.jsonl"
    if missing:
        raise MissingDataError(_missing(name, folder, missing, present))
    return paths


def _missing(
    name: str, folder: Path, missing: list[tuple[bool, tuple[str, ...]]], present: list[str]
) -> str:
    """``missing``: whether a split is for examples, and the stems that may stand for it."""
    lacks, said = [], []
    for for_examples, stems in missing:
        names = " or ".join(f"{stem}.jsonl" for stem in stems)
        lacks.append(f"for its examples no {names}" if for_examples else f"no {names}")
        said.append("fewshot" if for_examples else "evaluation")
    has = f"it has {', '.join(f'{stem}.jsonl' for stem in present)}" if present else "nothing there"
    remedy = "put the split there, one JSON object a line, with the field names of the hub's"
    if len(missing) > 1:
        remedy = remedy.replace("the split", "them")
    if present:
        other = f"[{present[0]}]"
        files = other if said == ["evaluation"] else f"{{{said[0]}: {other}}}"
        remedy += f"; or let the recipe say tasks: [{{name: {name}, files: {files}}}]"
    return f"{name}: {' and '.join(lacks)} in {folder} ({has}); {remedy}"


def _others(config: dict[str, Any], files: tuple[DataFile, ...]) -> str:
    """What stands for a split, where it is another's file."""
    said = []
    for file in files:
        if file.path.stem != file.split:
            of_examples = file.split != evaluation_split(config)
            said.append(f"examples: {file.path.stem}" if of_examples else file.path.stem)
    return ", ".join(said)


def _hub_data(name: str, config: dict[str, Any]) -> HubData | None:
    """None for a task that loads its data itself, or from files that its definition names."""
    repository = config.get("dataset_path")
    stated = config.get("dataset_kwargs") or {}
    if (
        not isinstance(repository, str)
        or "class" in config
        or config.get("custom_dataset")
        or repository in LOCAL_FORMATS
        or Path(repository).exists()
    ):
        return None
    try:
        commit = hub.dataset_commit(repository, stated.get("revision"), config.get("dataset_name"))
    except DataError as error:
        raise DataError(
            f"{name}: {error}; or put the data into DIR/{name}/{evaluation_split(config)}.jsonl "
            "and say --data DIR"
        ) from error
    return HubData(repository=repository, name=config.get("dataset_name"), commit=commit)


INDEXES = ("label", "gold")  # usual names of the field that says which choice is right
ANSWERS = (*INDEXES, "answerKey", "answer")  # and of those that say it in words
CHECKED = "_qbench_checked"  # the limits within which all documents of a task have answers


def check_labels(task: LoadedTask, limit: int | None = None) -> None:
    """Raises DataError where one of the first ``limit`` documents of ``task`` has no right answer:
    a label that is missing, hidden (−1) or names none of the choices.

    Tasks with a ``process_results`` of their own judge by their own rules and are only checked
    for targets that cannot be made at all.
    """
    from qbench.evaluation.scoring.overhead import less_overhead

    inner = task.task
    if limit in getattr(inner, CHECKED, ()):
        return
    problems = []
    with less_overhead():
        documents = listed(inner.eval_docs)[:limit]
        for number, document in enumerate(documents):
            if (problem := _problem(inner, document)) is not None:
                problems.append((number, problem))
    if problems:
        number, problem = problems[0]
        more = f" ({len(problems)} of {len(documents)} documents are like it)"
        raise DataError(
            f"{task.name}: {task.location(number)}: {problem}{more if len(problems) > 1 else ''}; "
            "correct it, leave the document out, or use a split whose answers are public"
        )
    setattr(inner, CHECKED, {*getattr(inner, CHECKED, ()), limit})


def _problem(inner: Any, document: dict[str, Any]) -> str | None:
    try:
        target = (inner.doc_to_text if inner.multiple_input else inner.doc_to_target)(document)
        if inner.OUTPUT_TYPE != "multiple_choice":
            return "there is no target text" if _no_target(target, document) else None
        choices = inner.doc_to_choice(document)
    except Exception as error:  # of a definition's own template or function
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return f"its answer cannot be found ({type(error).__name__}: {reason[0]})"
    if callable(inner.config.process_results):
        return None
    if not choices or not all(isinstance(choice, str) for choice in choices):
        return f"its choices are {choices!r:.80}, not texts"
    # A definition's function may make an answer of anything: `first if label == 0 else second`.
    for name in ANSWERS:
        if name in document and _hidden(document[name], index=name in INDEXES):
            return f"{name} {document[name]!r} is no answer"
    golds = target if isinstance(target, list) and target else [target]
    for gold in golds:
        if not _names(gold, choices):
            return (
                f"label {gold!r:.80} names none of its {len(choices)} choices "
                f"(0 to {len(choices) - 1}, or the text of one)"
            )
    return None


def _names(gold: Any, choices: list[str]) -> bool:
    """Whether ``gold`` is the index of a choice, or its text."""
    if isinstance(gold, str):
        return gold in choices
    if isinstance(gold, float):  # a column of whole numbers with one that is missing
        return gold.is_integer() and 0 <= gold < len(choices)
    return isinstance(gold, int) and 0 <= gold < len(choices)


def _hidden(label: Any, *, index: bool) -> bool:
    """What data sets write where an answer is missing or kept from the public."""
    if index and isinstance(label, int | float):
        return label < 0 or label != int(label)
    return label is None or label == ""


def _no_target(target: Any, document: dict[str, Any]) -> bool:
    """None, an empty list, or what a template makes of a field that is null."""
    if target is None or target == []:
        return True
    rendered_null = isinstance(target, str) and target.strip() == "None"
    return rendered_null and any(value is None for value in document.values())


def listed(documents: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """New dictionaries, as iteration gives them, in order. datasets makes those of a table row by
    row, which takes twenty times as long as all of them together. What it decodes (images, audio)
    or gives in another format is iterated over."""
    from datasets import Dataset
    from datasets.features.features import require_decoding

    if (
        not isinstance(documents, Dataset)
        or documents.format["type"] is not None
        or documents.format["columns"] != documents.column_names
        or require_decoding(documents.features)
    ):
        return list(documents)
    return documents.to_list()


SPLIT_KEYS = ("training_split", "validation_split", "test_split", "fewshot_split")
# Where documents come from, which is not what is asked about them.
ORIGIN_KEYS = {"custom_dataset", "dataset_kwargs", "metadata", "tag", *SPLIT_KEYS}
KEPT = 256  # tasks in memory


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedTask:
    """A task with its documents in memory."""

    name: str
    label: str
    task: ConfigurableTask | passkey.Passkey
    digest: str  # of what is asked and of its documents, wherever they came from
    lines: tuple[tuple[Path, int], ...] = ()  # file and line of each document, where it has one

    @property
    def documents(self) -> int:
        return len(self.task.eval_docs)

    def location(self, document: int) -> str:
        """Where a document stands, for messages: file and line, or its number."""
        if self.lines:
            path, line = self.lines[document]
            return f"{path}:{line}"
        return f"document {document}"

    @property
    def kind(self) -> str:
        """lm-eval's word for how a task is asked, or ``passkey``."""
        return self.task.OUTPUT_TYPE


@functools.lru_cache(maxsize=KEPT)
def load_task(planned: TaskSpec) -> LoadedTask:
    """lm-eval's object of ``planned``; the same one each time that a process asks.

    Raises DataError where definition or data are no longer those that were planned, or where
    lm-eval cannot use them.
    """
    if planned.output_type == passkey.KIND:
        task = passkey.Passkey(passkey.require_length(planned.name))
        digest = planned.definition_digest
        return LoadedTask(name=planned.name, label=planned.label, task=task, digest=digest)
    config = read_definition(planned.definition).config
    config["num_fewshot"] = planned.num_fewshot
    overrides, lines = _overrides(planned, config)
    try:
        task = hub.patiently(lambda: _build(planned.definition, overrides))
    except DataError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None:
            raise
        location = str(planned.definition)
        raise DataError(missing_module(planned.name, error.name, location)) from error
    except Exception as error:
        raise DataError(_reason(planned, config, error)) from error
    if read_definition(planned.definition).digest != planned.definition_digest:
        raise DataError(
            f"{planned.name}: its definition, {planned.definition} or the code beside it, changed "
            "after this run began; run again"
        )
    if planned.hub_data is not None:
        _require_commit(planned, task)
    if len(lines) != len(task.eval_docs):
        lines = ()
    return LoadedTask(
        name=planned.name, label=planned.label, task=task, digest=_digest(task), lines=lines
    )


def _overrides(
    planned: TaskSpec, config: dict[str, Any]
) -> tuple[dict[str, Any], tuple[tuple[Path, int], ...]]:
    """What is put in place of the definition's own, and where each evaluated row stands."""
    overrides: dict[str, Any] = {"task": planned.name}
    if planned.stated_fewshot is not None:
        overrides["num_fewshot"] = planned.stated_fewshot
    if planned.hub_data is not None:
        stated = config.get("dataset_kwargs") or {}
        return {
            **overrides,
            "dataset_kwargs": {**stated, "revision": planned.hub_data.commit},
        }, ()
    if not planned.files:
        return overrides, ()
    splits: dict[str, list[dict[str, Any]]] = {}
    lines: tuple[tuple[Path, int], ...] = ()
    for file in planned.files:
        rows, digest = read_rows(file.path)
        if digest != file.digest:
            raise DataError(
                f"{planned.name}: {file.path} changed after this run began; run again, so that "
                "its scores stand under the key of what was scored"
            )
        splits[file.split] = [row.fields for row in rows]
        if file.split == evaluation_split(config) and not config.get("process_docs"):
            lines = tuple((file.path, row.line) for row in rows)
    for key in SPLIT_KEYS:
        if config.get(key) not in (None, *splits):
            overrides[key] = None
    if config.get("fewshot_config") and not fewshot_split(config):
        overrides["fewshot_config"] = None
    overrides["custom_dataset"] = lambda **_: _datasets(splits)
    return overrides, lines


def _datasets(splits: dict[str, list[dict[str, Any]]]) -> DatasetDict:
    from datasets import Dataset, DatasetDict

    return DatasetDict({split: Dataset.from_list(rows) for split, rows in splits.items()})


def _build(path: Path, overrides: dict[str, Any]) -> ConfigurableTask:
    from lm_eval.tasks._factory import TaskFactory
    from lm_eval.tasks._index import TaskIndex
    from lm_eval.tasks._yaml_loader import load_yaml

    process = load_yaml(path).get("process_docs")
    if callable(process):
        overrides = {**overrides, "process_docs": _once(process)}
    _seed()
    with _examples_listed():
        entry = TaskIndex.entry_from_path(path)
        return TaskFactory().build(entry, overrides=overrides, registry={})


@contextlib.contextmanager
def _examples_listed() -> Iterator[None]:
    """Within it a task takes what examples are drawn from out of its table at once."""
    from lm_eval.api.task import ConfigurableTask

    usual = ConfigurableTask.fewshot_docs

    def fewshot_docs(task: ConfigurableTask) -> Any:
        documents = usual(task)
        return None if documents is None else listed(documents)

    ConfigurableTask.fewshot_docs = fewshot_docs
    try:
        yield
    finally:
        ConfigurableTask.fewshot_docs = usual


def _once(process: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """lm-eval asks for processed documents again and again. Of data on disk, datasets remembers
    them; of data in memory, a definition that draws would make other ones each time, so that
    answers met other choices than were asked about."""
    known: list[tuple[Any, Any]] = []

    @functools.wraps(process)
    def process_docs(documents: Any) -> Any:
        for seen, made in known:
            if seen is documents:
                return made
        known.append((documents, process(documents)))
        return known[-1][1]

    return process_docs


def _seed() -> None:
    """As lm-eval does before it builds tasks: some shuffle their choices meanwhile (gpqa)."""
    import numpy as np
    import torch

    random.seed(RANDOM_SEED)
    np.random.seed(NUMPY_SEED)
    torch.manual_seed(TORCH_SEED)


def _reason(planned: TaskSpec, config: dict[str, Any], error: Exception) -> str:
    if hub.failed(error):
        return (
            f"{planned.name}: the hub did not give its data: {hub.reason(error)}; or put the data "
            f"into DIR/{planned.name}/{evaluation_split(config)}.jsonl and say --data DIR"
        )
    first = (str(error).strip().splitlines() or [""])[0]
    line = f"{planned.name}: {type(error).__name__}: {first}"
    if planned.files:
        return f"{line}; are the fields those of {config.get('dataset_path')}?"
    return line


def _require_commit(planned: TaskSpec, task: ConfigurableTask) -> None:
    """datasets takes another commit's copy where the hub is out of reach."""
    assert planned.hub_data is not None
    for split in task.dataset.values():
        for file in split.cache_files:
            if planned.hub_data.commit not in Path(file["filename"]).parts:
                raise DataError(
                    f"{planned.name}: {planned.hub_data.repository} was planned at commit "
                    f"{planned.hub_data.commit[:12]}, and the copy that was loaded is another "
                    f"({file['filename']}); run again where the hub can be reached"
                )


def _digest(task: ConfigurableTask) -> str:
    """SHA-256 over the definition (functions by their source), every evaluated document and,
    where examples are shown, every document that they are drawn from."""
    left_out = ORIGIN_KEYS if task.config.num_fewshot else {*ORIGIN_KEYS, "fewshot_config"}
    config = {key: value for key, value in task.dump_config().items() if key not in left_out}
    total = hashlib.sha256(json.dumps(config, sort_keys=True, default=_written).encode())
    documents = listed(task.eval_docs)
    if task.config.num_fewshot:
        documents += list(task.sampler.df)
    for document in documents:
        total.update(json.dumps(document, sort_keys=True, default=_written).encode())
    return total.hexdigest()


def _written(value: Any) -> str:
    """What JSON cannot hold, the same in every process: functions by source, not by address."""
    if callable(value):
        try:
            return inspect.getsource(value)
        except (OSError, TypeError):
            return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
