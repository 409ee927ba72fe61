"""lm-eval's task object from what was planned, with the data that was planned."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench import hub
from qbench.errors import DataError
from qbench.evaluation import passkey
from qbench.evaluation.data import read_rows
from qbench.evaluation.definitions import read_definition
from qbench.evaluation.documents import listed
from qbench.evaluation.modules import missing_module
from qbench.evaluation.planned import PlannedTask, evaluation_split, fewshot_split
from qbench.evaluation.settings import NUMPY_SEED, RANDOM_SEED, TORCH_SEED

if TYPE_CHECKING:
    from datasets import DatasetDict
    from lm_eval.api.task import ConfigurableTask

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
def load_task(planned: PlannedTask) -> LoadedTask:
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
    planned: PlannedTask, config: dict[str, Any]
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


def _reason(planned: PlannedTask, config: dict[str, Any], error: Exception) -> str:
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


def _require_commit(planned: PlannedTask, task: ConfigurableTask) -> None:
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
