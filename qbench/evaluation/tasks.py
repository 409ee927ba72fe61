"""Find a task's definition and data, digest both, and check what can be checked before they are
loaded. Imports no torch.

A plan holds these; ``qbench.evaluation.evaluate`` makes lm-eval's object of one. Definitions are
read from their YAML files without lm-eval, whose index parses 13,000 files with all that they
import, in twenty seconds; ours looks for names alone, in half a second.
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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, TemplateSyntaxError, meta

from qbench import hub
from qbench.errors import DataError, MissingDataError, RecipeError
from qbench.evaluation.settings import AnswerSettings
from qbench.files import digest, file_digest
from qbench.records import ANSWERS

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
    config = yaml.load(path.read_bytes(), _loader(path.parent))
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
    return path.read_bytes().decode(errors="replace")


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


RENDERED = ("doc_to_text", "doc_to_target", "doc_to_choice")  # templates over a row's fields
IMPOSSIBLE = {
    "unsafe_code": "runs code that the model writes",
    "doc_to_image": "asks about images",
    "doc_to_audio": "asks about sound",
}
BARE = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """One split's JSON Lines file; ``digest`` is the SHA-256 of its bytes."""

    split: str
    path: Path
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The JSON object of one line."""

    line: int  # counted from 1
    fields: dict[str, Any]

    def text(self, field: str, source: str | Path) -> str:
        """Return the text in ``field``, empty for a null. Raises DataError if it holds no text."""
        text = self.fields.get(field, 0)
        if not isinstance(text, str | None):
            fields = ", ".join(
                name for name, value in self.fields.items() if isinstance(value, str)
            )
            raise DataError(
                f"{source}:{self.line}: no text in field {field!r}; give --field one of: "
                f"{fields or 'none'}"
            )
        return text or ""


def read_rows(path: Path) -> tuple[list[Row], str]:
    """Return the rows of a JSON Lines file, and the SHA-256 of the bytes that were parsed.

    Raises DataError with file and line.
    """
    try:
        payload = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    # not splitlines: a string in JSON may hold U+2028, which is no end of a line
    rows = list(parse_rows(path, payload.split(b"\n")))
    if not rows:
        raise DataError(f"{path}: no documents in it")
    return rows, digest(payload)


def parse_rows(path: str | Path, lines: Iterable[bytes | str]) -> Iterator[Row]:
    """Yield the rows of the ``lines`` of a JSON Lines file. Raises DataError with file and line."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not JSON ({error})") from None
        if not isinstance(fields, dict):
            raise DataError(f"{path}:{number}: a JSON object is needed, this is {fields!r:.40}")
        yield Row(line=number, fields=fields)


def require_fields(name: str, definition: Definition, path: Path, rows: Sequence[Row]) -> None:
    """Raise DataError if a row lacks a field that the task's templates name, has nothing in it, or
    has a label that no choice meets. What the task computes with functions of its own is not
    checked.
    """
    config = definition.config
    if config.get("process_docs") or config.get("use_prompt"):
        return
    kind = config.get("output_type")
    for key in RENDERED:
        template = config.get(key)
        if not isinstance(template, str):
            continue
        _require_template(f"{key} of {name}", template, path, rows)
        if key == "doc_to_choice" or (key == "doc_to_target" and kind == "multiple_choice"):
            continue
        text = key == "doc_to_target" and kind == "loglikelihood_rolling"
        for row in rows:
            if reason := no_text(template, row.fields, text=text):
                raise DataError(f"{path}:{row.line}: {name}: {reason}")
    target = config.get("doc_to_target")
    if kind == "multiple_choice" and isinstance(target, str):
        _require_labels(name, target, path, rows)


KINDS: dict[type, str] = {
    bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list",
    dict: "an object",
}  # fmt: skip
LISTED = re.compile(r"\{\{\s*\[(\s*\w+\s*(?:,\s*\w+\s*)*)\]\s*\}\}")
TEXTS = "a list of texts"


def _required_kinds(config: dict[str, Any]) -> dict[str, str]:
    """Return what lm-eval needs in the fields that are choices or texts as they stand, by field."""
    choices, target = config.get("doc_to_choice"), config.get("doc_to_target")
    if config.get("process_docs") or config.get("use_prompt"):
        return {}
    if config.get("output_type") == "loglikelihood_rolling" and isinstance(target, str):
        return dict.fromkeys([target, *BARE.findall(target)], "a text")
    if not isinstance(choices, str) or callable(config.get("process_results")):
        return {}
    listed = LISTED.fullmatch(choices.strip())
    texts = dict.fromkeys(map(str.strip, listed[1].split(",")), "a text") if listed else {}
    return {choices: TEXTS, **texts}


def _require_kinds(name: str, path: Path, rows: Sequence[Row], config: dict[str, Any]) -> None:
    """Raise DataError if a field holds values of two kinds, of which datasets makes no column, or
    is of another kind than the task needs."""
    first: dict[str, tuple[str, int]] = {}
    needed = _required_kinds(config)
    for row in rows:
        for field, value in row.fields.items():
            if value is None:
                continue
            kind, line = first.setdefault(field, (KINDS[type(value)], row.line))
            if KINDS[type(value)] != kind:
                raise DataError(
                    f"{path}:{row.line}: {name}: field {field!r} is {KINDS[type(value)]}, and "
                    f"{kind} in line {line}; write the same kind in every line"
                )
            if isinstance(value, list):
                kinds = {KINDS[type(element)] for element in value if element is not None}
                if len(kinds) > 1:
                    raise DataError(
                        f"{path}:{row.line}: {name}: the list in field {field!r} mixes "
                        f"{' and '.join(sorted(kinds))}; write one kind"
                    )
                kind = TEXTS if kinds == {"a text"} else kind
            if needed.get(field, kind) != kind:
                raise DataError(f"{path}:{row.line}: {_other_kind(name, field, kind, needed)}")


def _other_kind(name: str, field: str, kind: str, needed: dict[str, str]) -> str:
    return f"{name}: field {field!r} is {kind}, and the task needs {needed[field]} there"


def no_text(template: str, fields: dict[str, Any], *, text: bool) -> str | None:
    """Return why a field that ``template`` prints as it is has nothing to print; None if it has.

    That is null, ``[]`` or ``{}``, which Jinja prints as Python does; with ``text`` everything that
    is not a text with something in it.
    """
    names = [template] if template in fields else BARE.findall(template)
    for name in names:
        if name not in fields:
            continue
        value = fields[name]
        if value is None or value == [] or value == {}:
            return f"{name} is {json.dumps(value)}, so there is nothing to ask"
        if text and not (isinstance(value, str) and value.strip()):
            return f"{name} is {json.dumps(value)[:40]}, and a text to score is needed"
    return None


def _require_template(what: str, template: str, path: Path, rows: Sequence[Row]) -> None:
    needed = {template} if template in rows[0].fields else _variables(template)
    for row in rows:
        if missing := sorted(needed - row.fields.keys()):
            raise DataError(
                f"{path}:{row.line}: no field {missing[0]!r}, which {what} needs; "
                f"this line has {', '.join(row.fields) or 'none'}"
            )


def _variables(template: str) -> set[str]:
    """Return the fields that a template needs; none for a template that tests for them itself, as
    by ``is defined``.
    """
    if any(word in template for word in ("{%", "defined", "default", " if ")):
        return set()
    try:
        return meta.find_undeclared_variables(Environment().parse(template))
    except TemplateSyntaxError:
        return set()  # lm-eval says so


def _require_labels(name: str, target: str, path: Path, rows: Sequence[Row]) -> None:
    """Raise DataError for labels that are hidden as −1 or null, as those of public test sets."""
    bare = BARE.fullmatch(target.strip())
    field = bare[1] if bare else target
    for row in rows:
        if field not in row.fields:
            return  # a template, or a fixed index among the choices
        if is_hidden(label := row.fields[field]):
            raise DataError(
                f"{path}:{row.line}: {name}: its label, {field}, is {json.dumps(label)}: missing "
                "or hidden; score a split whose labels are known"
            )


def is_hidden(label: Any) -> bool:
    """Return whether a label is one that data sets write for a choice that is missing or kept from
    the public.
    """
    if isinstance(label, int | float):
        return not label >= 0 or label % 1 != 0  # NaN is not
    return label in (None, "", "-1")


MAX_GEN_TOKS = 256  # lm-eval's, if a task states none
LIMIT_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
LOCAL_FORMATS = ("arrow", "csv", "json", "pandas", "parquet", "text")  # of datasets.load_dataset


@dataclass(frozen=True, kw_only=True, slots=True)
class HubData:
    """A data set of the hub at one commit."""

    repository: str
    name: str | None  # of its configuration
    commit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSpec:
    """A task whose definition and data are found and digested, and not loaded.

    ``digest`` covers all that can change what a model is asked: the definition with the code that
    it names, and its local files' bytes or its data set's commit.
    """

    name: str
    label: str  # as tables show it: the name, and what stands for its evaluation split if another
    definition: Path  # the YAML file
    definition_digest: str
    documents: int | None  # None where only loading tells
    output_type: str
    max_gen_toks: int  # tokens that a generated answer may have
    stated_fewshot: int | None = None  # as the recipe says; None: as the definition says
    num_fewshot: int = 0
    needs_tokenizer: bool = False  # its data are made by a function that is given a tokenizer
    max_length: int | None = None  # tokens of a prompt with its answer, if the definition says so
    files: tuple[DataFile, ...] = ()  # the evaluation split's first; none where the hub gives them
    hub_data: HubData | None = None
    answers: AnswerSettings | None = None  # of the prompts of a recipe's ``answers``, no other task

    @property
    def digest(self) -> str:
        data = [(file.split, file.digest) for file in self.files]
        parts = {
            "definition": self.definition_digest,
            "files": data,
            "hub": asdict(self.hub_data) if self.hub_data else None,
            **({"answers": asdict(self.answers)} if self.answers else {}),
        }
        return digest(json.dumps(parts, sort_keys=True).encode())


def plan_task(
    name: str,
    *,
    data: Path | None,
    definitions: Path | None,
    files: Sequence[str] | None = None,
    fewshot_files: Sequence[str] | None = None,
    num_fewshot: int | None = None,
) -> TaskSpec:
    """Find the leaf task ``name`` and its data, and check what can be checked without loading it.

    ``data`` is a folder of ``<task>/<split>.jsonl`` with the task's own field names, None means the
    hub; ``definitions`` a folder of further lm-eval task definitions, searched first. ``files`` are
    the stems that may stand for the evaluation split, ``fewshot_files`` those for the one that
    examples are drawn from; the first that exists is used.

    Raises RecipeError for an unknown task, DataError where its data cannot be had.
    """
    path = definition_file(name, definitions)
    definition = read_definition(path)
    for key, what in IMPOSSIBLE.items():
        if definition.config.get(key):
            raise DataError(f"{name}: it {what}, which qbench cannot do; leave the task out")
    require_modules(name, definition)
    config = {**definition.config, "num_fewshot": definition.config.get("num_fewshot")}
    label = name
    if num_fewshot is not None:
        if num_fewshot != (config["num_fewshot"] or 0):
            label += f" ({num_fewshot}-shot)"
        config["num_fewshot"] = num_fewshot
    data_files, documents = _local_files(name, definition, config, data, files, fewshot_files)
    hub_data = None if data_files else _hub_data(name, config)
    if hub_data is not None:
        documents = _prepared_documents(name, config, hub_data)
    others = [
        file.path.stem if file.split == evaluation_split(config) else f"examples: {file.path.stem}"
        for file in data_files
        if file.path.stem != file.split  # what stands for a split
    ]
    if others:
        label += f" [{', '.join(others)}]"
    if shows_itself(config):
        label += " (examples may be the document itself)"
    return TaskSpec(
        name=name,
        label=label,
        definition=path,
        definition_digest=definition.digest,
        stated_fewshot=num_fewshot,
        num_fewshot=config["num_fewshot"] or 0,
        needs_tokenizer=isinstance(config.get("custom_dataset"), Function) and not data_files,
        max_length=(config.get("metadata") or {}).get("max_length"),
        files=data_files,
        hub_data=hub_data,
        documents=documents,
        output_type=config.get("output_type", "generate_until"),
        max_gen_toks=_answer_tokens(name, config.get("generation_kwargs") or {}),
    )


PROMPTS = OURS / "chat_prompts.yaml"  # the definition of a file of prompts


def plan_answers(
    prompts: str, settings: AnswerSettings, *, data: Path | None, definitions: Path | None
) -> TaskSpec:
    """Return the task ``ANSWERS`` with the prompts of the JSON Lines file ``prompts``, of
    ``chat_prompts``, which come with qbench, or of the task of that name.

    Raises DataError for a file that cannot be used, RecipeError for an unknown task.
    """
    if settings.from_task:
        spec = plan_task(prompts, data=data, definitions=definitions)
        if spec.output_type == "loglikelihood_rolling":
            raise DataError(f"answers: {prompts} scores whole texts and has no prompts")
        return replace(
            spec, name=ANSWERS, label=f"{ANSWERS} [{spec.label}]", answers=settings,
            max_gen_toks=settings.max_new_tokens,
        )  # fmt: skip
    path = PROMPTS.with_suffix(".jsonl") if prompts == PROMPTS.stem else Path(prompts)
    rows, digest = read_rows(path)
    for row in rows:
        prompt_fields(row, path)
    return TaskSpec(
        name=ANSWERS,
        label=ANSWERS,
        definition=PROMPTS,
        definition_digest=read_definition(PROMPTS).digest,
        documents=len(rows),
        output_type="generate_until",
        max_gen_toks=settings.max_new_tokens,
        files=(DataFile(split="test", path=path, digest=digest),),
        answers=settings,
    )


def prompt_fields(row: Row, path: Path) -> dict[str, str]:
    """Return the fields ``prompt`` (text for people), ``messages`` (JSON) and ``target`` ("" if
    there is none) of a prompt. Raises DataError with file and line."""
    prompt, messages = row.fields.get("prompt"), row.fields.get("messages")
    turn = isinstance(prompt, str) and prompt.strip() and messages is None
    turns = prompt is None and isinstance(messages, list) and messages and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys()
        and isinstance(message["role"], str) and isinstance(message["content"], str)
        for message in messages
    )  # fmt: skip
    if not (turn or turns):
        raise DataError(
            f'{path}:{row.line}: a prompt is {{"prompt": TEXT}}, or {{"messages": [{{"role": '
            '"user", "content": TEXT}, …]}'
        )
    target = row.fields.get("target")
    if not isinstance(target, str | None):
        raise DataError(f"{path}:{row.line}: target must be a text, not {target!r:.40}")
    if turn:
        messages = [{"role": "user", "content": prompt}]
    text = prompt if turn else "\n".join(f"{m['role']}: {m['content']}" for m in messages)
    return {"prompt": text, "messages": json.dumps(messages), "target": target or ""}


def evaluation_split(config: dict[str, Any]) -> str | None:
    """Return the split that lm-eval scores: test, or validation if there is no test split."""
    return config.get("test_split") or config.get("validation_split")


def fewshot_split(config: dict[str, Any]) -> str | None:
    """Return the split that few-shot examples come from; None if the task shows none."""
    if not config.get("num_fewshot"):
        return None
    fewshot_config = config.get("fewshot_config") or {}
    if fewshot_config.get("samples") is not None:
        return None
    return (
        fewshot_config.get("split")
        or config.get("fewshot_split")
        or config.get("training_split")
        or config.get("validation_split")
        or config.get("test_split")
    )


def shows_itself(config: dict[str, Any]) -> bool:
    """Return whether lm-eval may show a document with its answer before asking about it: examples
    are drawn from the split that is scored, and it leaves the document out of the draw only if the
    stated split of examples is the test split."""
    pool = fewshot_split(config)
    return pool is not None and pool == evaluation_split(config) and not _leaves_out(config)


def _leaves_out(config: dict[str, Any]) -> bool:
    """Return whether lm-eval draws one example more and drops the document that is asked about."""
    split = (config.get("fewshot_config") or {}).get("split") or config.get("fewshot_split")
    return split == config.get("test_split")


def _answer_tokens(name: str, generation: dict[str, Any]) -> int:
    """Return the most tokens of an answer, under the names that lm-eval takes in this order."""
    for key in LIMIT_KEYS:
        if (value := generation.get(key)) is not None:
            try:
                return int(value)
            except (TypeError, ValueError):
                raise DataError(
                    f"{name}: generation_kwargs: {key}: {value!r:.40} is no number of tokens"
                ) from None
    return MAX_GEN_TOKS


def _local_files(
    name: str,
    definition: Definition,
    config: dict[str, Any],
    data: Path | None,
    files: Sequence[str] | None,
    fewshot_files: Sequence[str] | None,
) -> tuple[tuple[DataFile, ...], int | None]:
    """Return the files and the number of documents; no files if there is no data folder."""
    makes_data = isinstance(config.get("custom_dataset"), Function)
    if data is None or (makes_data and not (data / name).is_dir()):
        return (), None
    split, examples = evaluation_split(config), fewshot_split(config)
    if split is None or "class" in config:
        raise DataError(
            f"{name}: it is defined in Python and loads its data itself; run it without a data "
            "folder"
        )
    stems = {split: tuple(files or (split,))}
    if examples and examples != split:
        stems[examples] = tuple(fewshot_files or (examples,))
    elif fewshot_files:
        why = f"its examples are of {split}, which is scored" if examples else "it has no examples"
        raise RecipeError(
            f"tasks: {name}: files: fewshot names a file, but {why}; set num_fewshot, or leave "
            "fewshot out"
        )
    paths = _paths(name, data / name, stems, examples)
    data_files, documents = [], None
    for of, path in paths.items():
        rows, digest = read_rows(path)
        require_fields(name, definition, path, rows)
        _require_kinds(name, path, rows, config)
        if of == examples:
            _require_examples(name, config, str(path), len(rows))
        data_files.append(DataFile(split=of, path=path, digest=digest))
        if of == split and not config.get("process_docs"):
            documents = len(rows)
    return tuple(data_files), documents


def _require_examples(name: str, config: dict[str, Any], source: str, documents: int) -> None:
    """Raise DataError if ``source`` has fewer documents than examples are drawn from it."""
    needed = config["num_fewshot"] + _leaves_out(config)
    processed = (config.get("fewshot_config") or {}).get("process_docs")
    if documents < needed and not processed and not config.get("process_docs"):
        raise DataError(
            f"{name}: num_fewshot {config['num_fewshot']}: {source} has {documents} documents to "
            f"draw examples from, {needed} are needed; lower num_fewshot or add documents"
        )


def _paths(
    name: str, folder: Path, stems_of: dict[str, tuple[str, ...]], examples: str | None
) -> dict[str, Path]:
    """Return the file of each split. Raises MissingDataError for the first that is missing."""
    present = sorted(path.stem for path in folder.glob("*.jsonl"))
    paths = {}
    for split, stems in stems_of.items():
        stem = next((stem for stem in stems if stem in present), None)
        if stem is None:
            names = " or ".join(f"{stem}.jsonl" for stem in stems)
            what = f"for its examples no {names}" if split == examples else f"no {names}"
            other = present[0] if present else "FILE"
            files = f"{{fewshot: [{other}]}}" if split == examples else f"[{other}]"
            has = ", ".join(f"{name_}.jsonl" for name_ in present) or "nothing"
            raise MissingDataError(
                f"{name}: {what} in {folder} (it has {has}); put the split "
                "there, one JSON object a line, with the field names of the hub's; or put "
                f"into the recipe tasks: [{{name: {name}, files: {files}}}]"
            )
        paths[split] = folder / f"{stem}.jsonl"
    return paths


def _hub_data(name: str, config: dict[str, Any]) -> HubData | None:
    """Return the hub's data set; None for a task that loads its data itself or from files that its
    definition names.
    """
    repository = config.get("dataset_path")
    kwargs = config.get("dataset_kwargs") or {}
    if (
        not isinstance(repository, str)
        or "class" in config
        or config.get("custom_dataset")
        or repository in LOCAL_FORMATS
        or Path(repository).exists()
    ):
        return None
    try:
        commit = hub.dataset_commit(repository, kwargs.get("revision"), config.get("dataset_name"))
    except DataError as error:
        raise DataError(
            f"{name}: {error}; or put the data into DIR/{name}/{evaluation_split(config)}.jsonl "
            "and add --data DIR"
        ) from error
    return HubData(repository=repository, name=config.get("dataset_name"), commit=commit)


def _prepared_documents(name: str, config: dict[str, Any], data: HubData) -> int | None:
    """Return the number of documents of a data set that ``datasets`` has prepared already; None if
    it has not, or if the task's own code picks them.

    Raises DataError if its columns or splits are not those that the task needs.
    """
    about = _prepared(data)
    if about is None:
        return None
    source = f"{data.repository} of the hub"
    columns = {field: _kind_of_column(column) for field, column in about["features"].items()}
    processed, needed = bool(config.get("process_docs")), _required_kinds(config)
    for key in () if processed or config.get("use_prompt") else RENDERED:
        template = config.get(key)
        if not isinstance(template, str) or template in columns:
            continue
        if missing := sorted(_variables(template) - columns.keys()):
            raise DataError(
                f"{name}: {source} has no field {missing[0]!r}, which {key} needs; it has "
                f"{', '.join(columns)}"
            )
    for field in needed.keys() & columns.keys():
        if columns[field] not in (needed[field], None):
            raise DataError(f"{source}: {_other_kind(name, field, str(columns[field]), needed)}")
    sizes = {split: part["num_examples"] for split, part in about["splits"].items()}
    split, examples = evaluation_split(config), fewshot_split(config)
    for of in filter(None, (split, examples)):
        if of not in sizes:
            raise DataError(f"{name}: {source} has no split {of}; it has {', '.join(sizes)}")
    if examples:
        _require_examples(name, config, f"{examples} of {source}", sizes[examples])
    return None if processed or split is None else sizes[split]


def _prepared(data: HubData) -> dict[str, Any] | None:
    """Return what ``datasets`` wrote about its copy of ``data``; None if it has none."""
    for folder in hub.prepared_copies(data.repository, data.name, data.commit):
        with suppress(OSError, ValueError):
            about = json.loads((folder / "dataset_info.json").read_bytes())
            if data.name in (None, about.get("config_name")) and about.get("splits"):
                return about
    return None


def _kind_of_column(column: Any) -> str | None:
    """Return the kind of value that a column of ``datasets`` holds, in the words of ``KINDS``; None
    if nothing can be said."""
    if isinstance(column, list) or column.get("_type") in ("List", "LargeList", "Sequence"):
        element = column[0] if isinstance(column, list) else column["feature"]
        return TEXTS if _kind_of_column(element) == "a text" else "a list"
    dtype = str(column.get("dtype", ""))
    if column.get("_type") == "ClassLabel" or dtype.startswith(("int", "uint", "float")):
        return "a number"
    return {"string": "a text", "large_string": "a text", "bool": "true or false"}.get(dtype)
