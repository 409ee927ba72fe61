"""lm-eval's own tasks, with their data from the hub or from a folder of JSON Lines files."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench import hub
from qbench.errors import DataError, RecipeError
from qbench.recipe import Task as TaskSettings

if TYPE_CHECKING:
    from datasets import DatasetDict
    from lm_eval.api.task import ConfigurableTask

TASK_KEY = r"[\"']?task[\"']?\s*:\s*"
SPLIT_KEYS = ("training_split", "validation_split", "test_split", "fewshot_split")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedTask:
    """A task with its documents in memory."""

    name: str
    label: str  # as tables show it: the name, and what stands for its evaluation split if another
    task: ConfigurableTask
    digest: str  # of its definition and its documents

    @property
    def documents(self) -> int:
        return len(self.task.eval_docs)


def load_task(settings: TaskSettings, *, data: Path | None, definitions: Path | None) -> LoadedTask:
    """Load one task by its lm-eval name.

    ``data`` is a folder of ``<task>/<split>.jsonl`` with the task's own field names, None means
    the hub; ``definitions`` a folder of further lm-eval task definitions, searched first.
    Raises RecipeError for an unknown task, DataError where its data cannot be had.
    """
    path = definition_file(settings.name, definitions)
    own = path.parent if definitions is not None and path.is_relative_to(definitions) else None
    config = _configuration(path)
    overrides: dict[str, Any] = {"task": settings.name}
    label = settings.name
    if settings.num_fewshot is not None:
        overrides["num_fewshot"] = settings.num_fewshot
        if settings.num_fewshot != (config.get("num_fewshot") or 0):
            label += f" ({settings.num_fewshot}-shot)"
    if data is not None:
        offline, stem = _offline(settings, {**config, **overrides}, data)
        overrides |= offline
        if stem:
            label += f" [{stem}]"
    try:
        task = _build(path, overrides)
    except DataError:
        raise
    except Exception as error:
        split, path = evaluation_split(config), config.get("dataset_path")
        remedy = (
            f"are the fields those of {path}?"
            if data is not None
            else f"or put the data into DIR/{settings.name}/{split}.jsonl and say --data DIR"
        )
        given = f"the hub did not give {path}: " if data is None and hub.failed(error) else ""
        raise DataError(f"{settings.name}: {given}{hub.reason(error)}; {remedy}") from error
    return LoadedTask(name=settings.name, label=label, task=task, digest=_digest(task, own))


def expand(name: str, definitions: Path | None) -> list[str]:
    """The leaf tasks that ``name`` stands for: itself, or the members of a group or tag."""
    try:
        definition_file(name, definitions)
    except RecipeError:
        pass
    else:
        return [name]
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(definitions) if definitions else None)
    entry = manager.task_index.get(name)
    if entry is None:
        near = difflib.get_close_matches(name, manager.all_subtasks, n=3)
        raise RecipeError(
            f"lm-eval has no task {name!r}"
            + (f"; near it: {', '.join(near)}" if near else "; `qbench list tasks` names them")
        )
    return _members(name, manager)


def definition_file(name: str, definitions: Path | None) -> Path:
    """The YAML file that defines the leaf task ``name``. Raises RecipeError where none does.

    Reading the few lines that name tasks takes a second; lm-eval's own index of its 13,000
    files takes twenty.
    """
    for place in (definitions, _lm_eval_tasks()):
        if place is None:
            continue
        line = re.compile(rf"^{TASK_KEY}[\"']?{re.escape(name)}[\"']?\s*(#.*)?$", re.MULTILINE)
        for path in _definition_files(place):
            if line.search(_text(path)):
                return path
    raise RecipeError(f"lm-eval has no task {name!r}; `qbench list tasks` names them")


def task_names(definitions: Path | None = None) -> list[str]:
    """Names of all leaf tasks that lm-eval and ``definitions`` define, sorted."""
    line = re.compile(rf"^{TASK_KEY}[\"']?([^\s\"'#\[]+)", re.MULTILINE)
    places = [_lm_eval_tasks()] + ([definitions] if definitions else [])
    found = {m for place in places for path in _definition_files(place)
             for m in line.findall(_text(path))}  # fmt: skip
    return sorted(found)


def evaluation_split(config: dict[str, Any]) -> str | None:
    """The split that lm-eval scores: test, or validation where a task has no test split."""
    return config.get("test_split") or config.get("validation_split")


def _build(path: Path, overrides: dict[str, Any]) -> ConfigurableTask:
    from lm_eval.tasks._factory import TaskFactory
    from lm_eval.tasks._index import TaskIndex

    return TaskFactory().build(TaskIndex.entry_from_path(path), overrides=overrides, registry={})


def _offline(
    settings: TaskSettings, config: dict[str, Any], data: Path
) -> tuple[dict[str, Any], str | None]:
    """Overrides that make a task read ``data``, and the file's stem where it is not the split's."""
    split = evaluation_split(config)
    if split is None or "class" in config:
        raise DataError(
            f"{settings.name}: it is defined in Python and loads its data itself; "
            "run it without a data folder"
        )
    folder = data / settings.name
    present = sorted(path.stem for path in folder.glob("*.jsonl"))
    wanted = settings.files or (split,)
    stem = next((stem for stem in wanted if stem in present), None)
    if stem is None:
        raise DataError(_missing(settings.name, folder, wanted, present))
    files = {split: folder / f"{stem}.jsonl"}
    overrides: dict[str, Any] = {"custom_dataset": None}
    for key in SPLIT_KEYS:
        other = config.get(key)
        if other in (None, split):
            continue
        if other in present:
            files[other] = folder / f"{other}.jsonl"
        else:
            overrides[key] = None
    needed = _fewshot_split(config)
    if needed and needed not in files:
        raise DataError(_missing(settings.name, folder, (needed,), present, "for its examples "))
    if config.get("fewshot_config") and not needed:
        overrides["fewshot_config"] = None
    overrides["custom_dataset"] = lambda **_: _read_splits(files)
    return overrides, stem if stem != split else None


def _fewshot_split(config: dict[str, Any]) -> str | None:
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


def _missing(
    name: str, folder: Path, wanted: tuple[str, ...], present: list[str], why: str = ""
) -> str:
    has = f"it has {', '.join(f'{stem}.jsonl' for stem in present)}" if present else "nothing there"
    remedy = "put the split there, one JSON object a line, with the field names of the hub's"
    if present and not why:
        remedy += f"; or let the recipe say tasks: [{{name: {name}, files: [{present[0]}]}}]"
    files = " or ".join(f"{stem}.jsonl" for stem in wanted)
    return f"{name}: {why}no {files} in {folder} ({has}); {remedy}"


def _read_splits(files: dict[str, Path]) -> DatasetDict:
    from datasets import Dataset, DatasetDict

    return DatasetDict(
        {split: Dataset.from_list(read_lines(path)) for split, path in files.items()}
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a JSON Lines file. Raises DataError with file and line."""
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: not JSON ({error})") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: a JSON object is needed, this is {row!r:.40}")
            rows.append(row)
    if not rows:
        raise DataError(f"{path}: no documents in it")
    return rows


def _configuration(path: Path) -> dict[str, Any]:
    from lm_eval.tasks._yaml_loader import load_yaml

    return load_yaml(path, resolve_func=False)


def _members(name: str, manager: Any) -> list[str]:
    entry = manager.task_index[name]
    if entry.tags and entry.yaml_path is None:
        return sorted(entry.tags)
    members: list[str] = []
    children = (entry.cfg or {}).get("task", [])
    for child in [children] if isinstance(children, str) else children:
        if isinstance(child, dict) and child.keys() - {"task", "group"}:
            settings = ", ".join(sorted(child.keys() - {"task", "group"}))
            raise RecipeError(
                f"{name}: it changes {settings} of {child.get('task', child.get('group'))}; "
                "name its tasks one by one, with what you want of each"
            )
        child_name = child if isinstance(child, str) else child.get("task", child.get("group"))
        if not isinstance(child_name, str) or child_name not in manager.task_index:
            raise RecipeError(f"{name}: name its tasks one by one, its group is defined inline")
        known = manager.task_index[child_name]
        stated = known.cfg or {}
        is_leaf = known.yaml_path is not None and (
            "group" not in stated or isinstance(stated.get("task"), str)
        )
        members += [child_name] if is_leaf else _members(child_name, manager)
    return members


def _digest(task: ConfigurableTask, code_folder: Path | None) -> str:
    """SHA-256 over the definition (functions by their source), every evaluated document and,
    where examples are shown, every document that they are drawn from. ``code_folder`` holds a
    definition of the user's; lm-eval's own code is covered by its version."""
    config = {
        key: value
        for key, value in task.dump_config().items()
        if key not in ("custom_dataset", "dataset_kwargs", "metadata")
    }
    total = hashlib.sha256(json.dumps(config, sort_keys=True, default=_written).encode())
    documents = list(task.eval_docs)
    if task.config.num_fewshot:
        documents += list(task.sampler.df)
    for document in documents:
        total.update(json.dumps(document, sort_keys=True, default=_written).encode())
    for code in sorted(code_folder.glob("*.py")) if code_folder else ():
        total.update(code.read_bytes())  # what the definition's own functions may call
    return total.hexdigest()


def _written(value: Any) -> str:
    """What JSON cannot hold, the same in every process: functions by source, not by address."""
    if callable(value):
        try:
            return inspect.getsource(value)
        except (OSError, TypeError):
            return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _lm_eval_tasks() -> Path:
    import lm_eval

    return Path(lm_eval.__file__).parent / "tasks"


_FILES: dict[Path, list[Path]] = {}
_TEXTS: dict[Path, str] = {}


def _definition_files(place: Path) -> list[Path]:
    if place not in _FILES:
        _FILES[place] = sorted(place.rglob("*.yaml"))
    return _FILES[place]


def _text(path: Path) -> str:
    if path not in _TEXTS:
        _TEXTS[path] = path.read_text(encoding="utf-8", errors="replace")
    return _TEXTS[path]
