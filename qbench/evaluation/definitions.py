"""Read lm-eval's task definitions from their YAML files. Imports nothing of lm-eval.

lm-eval's own index parses its 13,000 files with everything that they import, which takes twenty
seconds; ours looks for names alone, in half a second.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qbench.errors import DataError, RecipeError
from qbench.files import file_digest, read_regular

NAMES = re.compile(
    r"^[\"']?(task|group)[\"']?[ \t]*:[ \t]*[\"']?([^\s\"'#\[]+)[\"']?[ \t]*(?:#.*)?$", re.MULTILINE
)
NEVER_INHERITED = "task_list"  # it lists tasks of the included file alone


@dataclass(frozen=True, slots=True)
class Function:
    """A ``!function module.name`` of a definition: code beside it, or an installed module."""

    name: str
    folder: Path

    @property
    def file(self) -> Path | None:
        """Return the Python file beside the definition; None if the module is installed."""
        module = self.name.rpartition(".")[0].replace(".", "/")
        path = self.folder / f"{module}.py"
        return path if path.is_file() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    """One task's definition with its includes resolved; values may be ``Function`` objects."""

    path: Path
    config: dict[str, Any]

    @property
    def sources(self) -> list[Path]:
        """Return the Python files that its functions are in or may call: all beside them."""
        paths: set[Path] = set()
        for function in _functions(self.config):
            if function.file is not None:
                paths |= {function.file, *function.folder.glob("*.py")}
        return sorted(paths)

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the definition and its sources, wherever they lie."""
        canonical = json.dumps(self.config, sort_keys=True, default=_written)
        total = hashlib.sha256(canonical.encode())
        for path in self.sources:
            total.update(f"{path.name} {file_digest(path)}\n".encode())
        return total.hexdigest()


def read_definition(path: Path) -> Definition:
    """Raises RecipeError for a file that is no definition."""
    try:
        config = _resolved(path.expanduser().resolve(), ())
    except (yaml.YAMLError, OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"{path}: not a task definition: {reason}") from None
    return Definition(path=path, config=config)


def definition_file(name: str, definitions: Path | None) -> Path:
    """Return the YAML file that defines the leaf task ``name``, in the folder ``definitions`` or,
    if it has none, in lm-eval. Raises RecipeError if neither does.
    """
    if (path := _found("task", name, definitions)) is not None:
        return path
    raise _unknown(name, definitions)


def expand(name: str, definitions: Path | None) -> list[str]:
    """Return the leaf tasks of ``name``: itself, or the members of a group or tag."""
    if _found("task", name, definitions) is not None:
        return [name]
    if (path := _found("group", name, definitions)) is not None:
        children = _children(name, read_definition(path).config)
        return [leaf for child in children for leaf in expand(child, definitions)]
    if tagged := _tagged(name, _folders(definitions)):
        return tagged
    raise _unknown(name, definitions)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMetric:
    """How a group's score is made. ``filters`` are lm-eval's, None for all that the tasks have;
    with ``weight_by_size`` tasks count by their documents, else alike.
    """

    metric: str
    filters: tuple[str, ...] | None
    weight_by_size: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskGroup:
    """A group with scores of its own over all its leaf ``tasks``."""

    name: str
    label: str
    tasks: tuple[str, ...]
    metrics: tuple[GroupMetric, ...]


def task_groups(name: str, definitions: Path | None) -> list[TaskGroup]:
    """Return the groups of ``name``, itself and those within it, that lm-eval gives a score of
    their own (``aggregate_metric_list``).
    """
    if _found("task", name, definitions) is not None:  # first: lm-eval's files need not be read
        return []
    path = _found("group", name, definitions)
    if path is None:
        return []
    config = read_definition(path).config
    metrics = tuple(
        GroupMetric(
            metric=entry["metric"],
            filters=tuple(_listed(entry.get("filter_list"))) or None,
            weight_by_size=bool(entry.get("weight_by_size", True)),
        )
        for entry in _listed(config.get("aggregate_metric_list"))
    )
    groups = []
    if metrics:
        members = tuple(expand(name, definitions))
        label = config.get("group_alias") or name
        groups.append(TaskGroup(name=name, label=label, tasks=members, metrics=metrics))
    for child in _children(name, config):
        groups += task_groups(child, definitions)
    return groups


def task_names(definitions: Path | None = None) -> list[str]:
    """Return the names of all leaf tasks of lm-eval and ``definitions``, sorted."""
    folders = _folders(definitions)
    return sorted({n for folder in folders for kind, n in _index(folder) if kind == "task"})


@functools.cache
def lm_eval_tasks() -> Path:
    """Return the folder of lm-eval's own definitions."""
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None, "lm-eval is installed with qbench"
    assert spec.origin is not None
    return Path(spec.origin).parent / "tasks"


def _resolved(path: Path, within: tuple[Path, ...]) -> dict[str, Any]:
    if path in within:
        raise ValueError(f"it includes itself through {path}")
    # not utf-8 by chance: yaml decides by the mark at the beginning
    config = yaml.load(read_regular(path), _loader(path.parent))
    if not isinstance(config, dict):
        raise ValueError(f"{path.name} is not a mapping")
    merged: dict[str, Any] = {}
    for included in _listed(config.pop("include", None)):
        inherited = _resolved((path.parent / str(included)).resolve(), (*within, path))
        merged |= {key: value for key, value in inherited.items() if key != NEVER_INHERITED}
    return merged | config


def _loader(folder: Path) -> type[yaml.SafeLoader]:
    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        pass

    Loader.add_constructor(
        "!function", lambda loader, node: Function(loader.construct_scalar(node), folder)
    )
    return Loader


def _functions(value: Any) -> Iterator[Function]:
    if isinstance(value, Function):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _functions(inner)


def _written(value: Any) -> str:
    return f"!function {value.name}" if isinstance(value, Function) else str(value)


MOST_FILES = 50_000  # below a folder of definitions; lm-eval's has 17,600
OURS = Path(__file__).parents[1] / "tasks"


def _folders(definitions: Path | None) -> list[Path]:
    """Return the folders of definitions in the order of search: the user's, ours, lm-eval's."""
    return [*([] if definitions is None else [definitions]), OURS, lm_eval_tasks()]


def _found(kind: str, name: str, definitions: Path | None) -> Path | None:
    """Return the file that says ``task: name`` or ``group: name``; None if there is none."""
    paths = (_index(folder).get((kind, name)) for folder in _folders(definitions))
    return next((path for path in paths if path), None)


def _index(folder: Path) -> dict[tuple[str, str], Path]:
    """Return the first file, in the order of their paths, for each kind and name."""
    return _read_index(folder, _state(folder))


@functools.lru_cache(maxsize=16)
def _read_index(folder: Path, state: int) -> dict[tuple[str, str], Path]:
    paths: dict[tuple[str, str], Path] = {}
    for path in _definition_files(folder):
        for kind, name in NAMES.findall(_text(path)):
            paths.setdefault((kind, name), path)
    return paths


def _state(folder: Path) -> int:
    """Return a number that changes with the files of ``folder``: a notebook may add a definition
    while it runs. Those of installed packages do not change."""
    if folder in (OURS, lm_eval_tasks()):
        return 0
    stats = [(str(path), (s := path.stat()).st_mtime_ns, s.st_size)
             for path in _definition_files(folder, templates=True)]  # fmt: skip
    return hash(tuple(stats))


def _children(name: str, config: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the tasks and groups of the group ``name``. Raises RecipeError if the
    group defines one inline, or changes it.
    """
    for child in _listed(config.get("task")):
        named = {"task": child} if isinstance(child, str) else child
        child_name = named.get("task", named.get("group"))
        if settings := ", ".join(sorted(named.keys() - {"task", "group"})):
            raise RecipeError(
                f"tasks: {name} changes {settings} of {child_name}; name its tasks one by one, "
                "each with its settings"
            )
        if not isinstance(child_name, str):
            raise RecipeError(f"tasks: {name}: its group is defined inline; name its tasks")
        yield child_name


def _listed(value: Any) -> list[Any]:
    """Return a list of what a definition may state once or as a list."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _tagged(tag: str, folders: list[Path]) -> list[str]:
    """Return the names of the tasks that carry ``tag``, in their definition or one they include."""
    word = re.compile(rf"(?<![\w-]){re.escape(tag)}(?![\w-])")
    tasks: set[str] = set()
    for folder in folders:
        texts = {path: _text(path) for path in _definition_files(folder, templates=True)}
        names = {path for path, text in texts.items() if "tag" in text and word.search(text)}
        todo = set(names)
        while todo:  # who includes one of these, and so on
            stems = {path.name for path in todo}
            todo = {
                path
                for path, text in texts.items()
                if path not in names and "include" in text and any(stem in text for stem in stems)
            }
            names |= todo
        for path in names:
            config = read_definition(path).config if path.suffix == ".yaml" else {}
            if tag in _listed(config.get("tag")) and "group" not in config:
                tasks.add(config["task"])
    return sorted(tasks)


def _unknown(name: str, definitions: Path | None) -> RecipeError:
    near = difflib.get_close_matches(name, task_names(definitions), n=3)
    more = f"similar: {', '.join(near)}" if near else "`qbench list tasks` names them"
    hint = "" if definitions else "; one of your own needs definitions: DIR, or --definitions DIR"
    return RecipeError(f"tasks: lm-eval has no task {name!r}; {more}{hint}")


def _definition_files(folder: Path, templates: bool = False) -> list[Path]:
    suffixes = ("yaml", "yml") if templates else (".yaml",)
    files, seen = list[Path](), 0
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        seen += len(names) + len(folders)
        if seen > MOST_FILES:
            raise RecipeError(
                f"definitions: {folder} holds more than {MOST_FILES:,} files; name the folder of "
                "the YAML files alone"
            )
        files += [
            Path(parent, name)
            for name in names
            if name.endswith(suffixes) and not name.startswith(".")
        ]
    return sorted(files)


def _text(path: Path) -> str:
    return read_regular(path).decode(errors="replace")


def require_modules(name: str, definition: Definition) -> None:
    """Raises DataError where the code of a task's functions imports what is not installed."""
    files = {function.file for function in _functions(definition.config) if function.file}
    for path in sorted(files):
        beside = {neighbour.stem for neighbour in path.parent.iterdir()}
        for module in _imported(path):
            package = module.partition(".")[0]
            if package not in beside and importlib.util.find_spec(package) is None:
                raise DataError(f"{name}: {missing_module(package)} ({path})")


def missing_module(module: str) -> str:
    """Return what to do if the code of a task imports ``module``, which is not installed."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is not None:
        why = f"{module}, which the installed {package} does not have:"
    else:
        why = f"{package}, which is not installed: pip install {package}, or"
    return f"its code imports {why} leave the task out"


def _imported(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports at its top level."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return  # lm-eval says so, with the line
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module
