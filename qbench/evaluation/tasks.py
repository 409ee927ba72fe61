"""Find a task's definition and data, digest both, and check what can be checked before they are
loaded. Imports no torch.

A plan holds these; ``qbench.evaluation.evaluate`` makes lm-eval's object of one. Definitions are
read from their YAML files without lm-eval, whose index parses 13,000 files with all that they
import, in twenty seconds; ours looks only for names, in half a second.
"""

from __future__ import annotations

import difflib
import functools
import glob
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from qbench import hub
from qbench.errors import DataError, MissingDataError, RecipeError
from qbench.evaluation.settings import AnswerSettings
from qbench.files import digest, file_digest, kept_digest
from qbench.records import ANSWERS

NAMES = re.compile(
    r"^[\"']?(task|group)[\"']?[ \t]*:[ \t]*[\"']?([^\s\"'#\[]+)[\"']?[ \t]*(?:#.*)?$", re.MULTILINE
)
MOST_FILES = 50_000  # below a folder of definitions; lm-eval's has 17,600
OURS = Path(__file__).parents[1] / "tasks"
INSTALLED = (OURS, Path(importlib.util.find_spec("lm_eval").origin).parent / "tasks")


@dataclass(frozen=True, slots=True)
class Function:
    """A ``!function module.name`` of a definition: code beside it, or an installed module."""

    name: str
    folder: Path

    def __str__(self) -> str:
        return f"!function {self.name}"


def read_definition(path: Path) -> dict[str, Any]:
    """Return the definition in the YAML file ``path``, includes resolved; values may be
    ``Function`` objects. Raises RecipeError if it is not one."""
    try:
        return _resolved(path.expanduser().resolve(), ())
    except (yaml.YAMLError, OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"{path}: not a task definition: {reason}; correct it") from None


def definition_digest(definition: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a definition, of the Python files beside it that its functions are in
    or may call (their folder's path plays no part), and of the local data files that it names."""
    todo, folders = [definition], set()
    while todo:
        value = todo.pop()
        if isinstance(value, Function):
            module = value.folder / f"{value.name.rpartition('.')[0].replace('.', '/')}.py"
            folders |= {module.parent} if module.is_file() else set()
        elif isinstance(value, dict | list):
            todo += value.values() if isinstance(value, dict) else value
    total = hashlib.sha256(json.dumps(definition, sort_keys=True, default=str).encode())
    for path in sorted({file for folder in folders for file in folder.glob("*.py")}):
        total.update(f"{path.name} {file_digest(path)}\n".encode())
    for path in _named_data(definition):
        total.update(f"{kept_digest(path, file_digest)}\n".encode())
    return total.hexdigest()


def _named_data(definition: Mapping[str, Any]) -> list[Path]:
    """Return the local files that ``definition`` has ``datasets`` read, sorted: those of
    ``data_files``, or else all below ``dataset_path`` or ``data_dir``; none of the hub."""
    source, kwargs = definition.get("dataset_path"), definition.get("dataset_kwargs") or {}
    if not isinstance(source, str) or not (source in LOCAL_FORMATS or Path(source).exists()):
        return []
    folder = Path("" if source in LOCAL_FORMATS else source, kwargs.get("data_dir") or "")
    folder = folder.expanduser()  # as datasets does for data_dir
    entries, names = [kwargs.get("data_files") or ("**" if folder.parts else [])], set[str]()
    while entries:
        value = entries.pop()
        if isinstance(value, str):
            names.update(glob.glob(str(folder / value), recursive=True))
        elif isinstance(value, dict | list):
            entries += value.values() if isinstance(value, dict) else value
    return [path for path in map(Path, sorted(names)) if path.is_file()]


def _resolved(path: Path, within: tuple[Path, ...]) -> dict[str, Any]:
    """Return the values of a definition with its includes merged. ``within``: the files that
    include it. Raises ValueError for a cycle."""
    if path in within:
        raise ValueError(f"it includes itself through {path}")

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        pass

    Loader.add_constructor(
        "!function", lambda loader, node: Function(loader.construct_scalar(node), path.parent)
    )
    # not utf-8 by chance: yaml decides by the mark at the beginning
    config = yaml.load(path.read_bytes(), Loader)
    if not isinstance(config, dict):
        raise ValueError(f"{path.name} is not a mapping")
    merged: dict[str, Any] = {}
    for included in _listed(config.pop("include", None)):
        inherited = _resolved((path.parent / str(included)).resolve(), (*within, path))
        inherited.pop("task_list", None)  # it lists only tasks of the included file
        merged |= inherited
    return merged | config


def definition_file(name: str, definitions: Path | None) -> Path:
    """Return the YAML file that defines the leaf task ``name``: in the folder ``definitions``, else
    of qbench, else of lm-eval. Raises RecipeError if none does."""
    if (path := _find("task", name, definitions)) is not None:
        return path
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


def expand(name: str, definitions: Path | None) -> tuple[list[str], list[TaskGroup]]:
    """Return the leaf tasks of ``name``: itself, or the members of a group or tag (tried in this
    order). Return also the groups, itself and groups within it, that have scores of their own
    (``aggregate_metric_list``). The folder ``definitions``, if given, is searched first. Raises
    RecipeError for an unknown name, or a group that defines or changes tasks within itself."""
    if _find("task", name, definitions) is not None:
        return [name], []
    path = _find("group", name, definitions)
    if path is None:
        if tagged := _tagged(name, definitions):
            return tagged, []
        raise _unknown(name, definitions)
    config = read_definition(path)
    members, groups = list[str](), list[TaskGroup]()
    for child in _children(name, config):
        leaves, within = expand(child, definitions)
        members += leaves
        groups += within
    metrics = tuple(
        GroupMetric(
            metric=entry["metric"],
            filters=tuple(_listed(entry.get("filter_list"))) or None,
            weight_by_size=bool(entry.get("weight_by_size", True)),
        )
        for entry in _listed(config.get("aggregate_metric_list"))
    )
    if metrics:
        label = config.get("group_alias") or name
        groups.insert(0, TaskGroup(name=name, label=label, tasks=tuple(members), metrics=metrics))
    return members, groups


def task_names(definitions: Path | None = None) -> list[str]:
    """Return the names of all leaf tasks of lm-eval, qbench and ``definitions``, sorted."""
    indexes = _indexes(definitions)
    return sorted({name for index in indexes for kind, name in index if kind == "task"})


def _find(kind: str, name: str, definitions: Path | None) -> Path | None:
    """Return the file that says ``task: name`` or ``group: name``; None if there is none."""
    paths = (index.get((kind, name)) for index in _indexes(definitions))
    return next((Path(path) for path in paths if path), None)


def _indexes(definitions: Path | None) -> Iterator[dict[tuple[str, str], str]]:
    """Yield (kind, name) → first file that defines it, by path, of the user's folder, ours and
    lm-eval's. The user's is read each time: a notebook may add definitions."""
    if definitions is not None:
        yield _read_index(definitions)
    yield from map(_installed_index, INSTALLED)


def _read_index(folder: Path) -> dict[tuple[str, str], str]:
    """Return (``task`` or ``group``, name) → the first file below ``folder`` that defines it."""
    paths: dict[tuple[str, str], str] = {}
    for path, text in _texts(folder, (".yaml",)):
        for kind, name in NAMES.findall(text):
            paths.setdefault((kind, name), path)
    return paths


_installed_index = functools.cache(_read_index)


def _texts(folder: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the files below ``folder`` with one of the ``suffixes``, in order, and their texts."""
    files, seen = list[str](), 0
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        seen += len(names) + len(folders)
        if seen > MOST_FILES:
            raise RecipeError(
                f"definitions: {folder} holds more than {MOST_FILES:,} files; name the folder of "
                "the YAML files alone"
            )
        visible = (name for name in names if not name.startswith("."))
        files += [os.path.join(parent, name) for name in visible if name.endswith(suffixes)]
    for path in sorted(files, key=lambda path: path.split(os.sep)):
        with open(path, "rb", buffering=0) as file:  # of 14,000: pathlib would take half of it
            yield path, file.read().decode(errors="replace")


def _children(name: str, config: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the tasks and groups of the group ``name``. Raises RecipeError if the
    group defines one inline, or changes it.
    """
    for child in _listed(config.get("task")):
        named = {"task": child} if isinstance(child, str) else child
        child_name = named.get("task", named.get("group"))
        if settings := ", ".join(sorted(named.keys() - {"task", "group"})):
            raise RecipeError(
                f"tasks: {name} changes {settings} of {child_name}; name the tasks of {name} one "
                "by one, each with its settings"
            )
        if not isinstance(child_name, str):
            raise RecipeError(
                f"tasks: {name} contains a group that is defined inline, which cannot be planned; "
                f"name the tasks of {name} one by one"
            )
        yield child_name


def _listed(value: Any) -> list[Any]:
    """Return ``value`` as a list: itself, or [value], or [] for None."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _tagged(tag: str, definitions: Path | None) -> list[str]:
    """Return the names of the tasks that carry ``tag``, in their definition or one they include."""
    word = re.compile(rf"(?<![\w-]){re.escape(tag)}(?![\w-])")
    tasks: set[str] = set()
    for folder in (*([] if definitions is None else [definitions]), *INSTALLED):
        texts = {Path(path): text for path, text in _texts(folder, ("yaml", "yml"))}
        names = {path for path, text in texts.items() if "tag" in text and word.search(text)}
        todo = set(names)
        while todo:  # files that include one of these, and so on
            stems = {path.name for path in todo}
            todo = {
                path
                for path, text in texts.items()
                if path not in names and "include" in text and any(stem in text for stem in stems)
            }
            names |= todo
        for path in names:
            config = read_definition(path) if path.suffix == ".yaml" else {}
            if tag in _listed(config.get("tag")) and "group" not in config:
                tasks.add(config["task"])
    return sorted(tasks)


def _unknown(name: str, definitions: Path | None) -> RecipeError:
    """Return the error for an unknown task, with similar names."""
    near = difflib.get_close_matches(name, task_names(definitions), n=3)
    more = f"similar: {', '.join(near)}" if near else "`qbench list tasks` names them"
    hint = "" if definitions else "; one of your own needs definitions: DIR, or --definitions DIR"
    return RecipeError(f"tasks: lm-eval has no task {name!r}; {more}{hint}")


def missing_module(module: str) -> str:
    """Return the end of a message: that the task's code imports ``module``, which is missing, and
    the remedy."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is not None:
        why = f"{module}, which the installed {package} does not have:"
    else:
        why = f"{package}, which is not installed: try pip install {package}, or"
    return f"its code imports {why} leave the task out"


IMPOSSIBLE = {
    "unsafe_code": "runs code that the model writes",
    "doc_to_image": "asks about images",
    "doc_to_audio": "asks about sound",
}


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
        """Return the text of ``field``, "" for null. Raises DataError, naming ``source`` and line,
        if it is missing or not text."""
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
    """Return the rows of a JSON Lines file, and the SHA-256 of the bytes that were parsed. Raises
    DataError, with file and line, for a broken row, and for a file that cannot be read or has no
    rows."""
    try:
        payload = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); name a readable JSON Lines file"
        ) from None
    # not splitlines: a string in JSON may hold U+2028, which is no end of a line
    rows = list(parse_rows(path, payload.split(b"\n")))
    if not rows:
        raise DataError(f"{path}: no documents in it; write one JSON object per line")
    return rows, digest(payload)


def parse_rows(path: str | Path, lines: Iterable[bytes | str]) -> Iterator[Row]:
    """Yield the rows of the ``lines`` of a JSON Lines file; blank lines are skipped, but counted.
    Raises DataError with ``path``, which is not opened, and line."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}:{number}: not JSON ({error}); write one object per line"
            ) from None
        if not isinstance(fields, dict):
            raise DataError(
                f"{path}:{number}: not a JSON object but {fields!r:.40}; write one object per line"
            )
        yield Row(line=number, fields=fields)


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
    """A task whose definition and data are located and hashed, but not loaded. ``digest`` covers
    all that can change its prompts: the definition with the code that it names, and its local
    files' bytes or its data set's commit."""

    name: str
    label: str  # as tables show it: the name, and the file of its split if that differs
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
        """Return the SHA-256 over definition, data and settings of answers."""
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
    """Locate the leaf task ``name`` and its data, and check what needs no loading.

    ``data`` is a folder of ``<task>/<split>.jsonl`` with the task's own field names; None: data
    come from the hub. ``definitions`` is a folder of further lm-eval task definitions, searched
    first. ``files``: names without .jsonl for the evaluation split in ``data``, ``fewshot_files``
    for the split of examples; the first that exists is used. ``num_fewshot``: None leaves the
    definition's.

    Raises RecipeError for an unknown task or bad definition; DataError if its data cannot be read
    or it asks for what qbench cannot do (images, sound, running code).
    """
    path = definition_file(name, definitions)
    definition = read_definition(path)
    for key, what in IMPOSSIBLE.items():
        if definition.get(key):
            raise DataError(f"{name}: it {what}, which qbench cannot do; leave the task out")
    config = {**definition, "num_fewshot": definition.get("num_fewshot")}
    label = name
    if num_fewshot is not None:
        if num_fewshot != (config["num_fewshot"] or 0):
            label += f" ({num_fewshot}-shot)"
        config["num_fewshot"] = num_fewshot
    data_files, documents = _local_files(name, config, data, files, fewshot_files)
    hub_data = None if data_files else _hub_data(name, config)
    others = [
        file.path.stem if file.split == evaluation_split(config) else f"examples: {file.path.stem}"
        for file in data_files
        if file.path.stem != file.split  # a file in place of a split
    ]
    if others:
        label += f" [{', '.join(others)}]"
    pool = fewshot_split(config)
    if pool is not None and pool == evaluation_split(config):
        # lm-eval leaves the document out of the draw only if the definition names the test split
        named = (config.get("fewshot_config") or {}).get("split") or config.get("fewshot_split")
        if named != config.get("test_split"):
            label += " (examples may be the document itself)"
    generation, max_gen_toks = config.get("generation_kwargs") or {}, MAX_GEN_TOKS
    for key in LIMIT_KEYS:
        if (value := generation.get(key)) is not None:
            try:
                max_gen_toks = int(value)
            except (TypeError, ValueError):
                raise DataError(
                    f"{name}: generation_kwargs: {key}: must be a whole number of tokens, not "
                    f"{value!r:.40}"
                ) from None
            break
    return TaskSpec(
        name=name,
        label=label,
        definition=path,
        definition_digest=definition_digest(definition),
        stated_fewshot=num_fewshot,
        num_fewshot=config["num_fewshot"] or 0,
        needs_tokenizer=isinstance(config.get("custom_dataset"), Function) and not data_files,
        max_length=(config.get("metadata") or {}).get("max_length"),
        files=data_files,
        hub_data=hub_data,
        documents=documents,
        output_type=config.get("output_type", "generate_until"),
        max_gen_toks=max_gen_toks,
    )


PROMPTS = OURS / "chat_prompts.yaml"  # the definition of a file of prompts


def plan_answers(
    prompts: str, settings: AnswerSettings, *, data: Path | None, definitions: Path | None
) -> TaskSpec:
    """Return the task ``ANSWERS`` with the prompts of ``prompts``: the path of a JSON Lines file,
    ``chat_prompts`` (those that come with qbench), or, with ``settings.from_task``, a task's name,
    for which ``data`` and ``definitions`` are those of ``plan_task``. Raises DataError for a file
    or task without prompts, RecipeError for an unknown task."""
    if settings.from_task:
        spec = plan_task(prompts, data=data, definitions=definitions)
        if spec.output_type == "loglikelihood_rolling":
            raise DataError(
                f"answers: {prompts} scores whole texts and has no prompts; name another task"
            )
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
        definition_digest=definition_digest(read_definition(PROMPTS)),
        documents=len(rows),
        output_type="generate_until",
        max_gen_toks=settings.max_new_tokens,
        files=(DataFile(split="test", path=path, digest=digest),),
        answers=settings,
    )


def prompt_fields(row: Row, path: Path) -> dict[str, str]:
    """Return the fields ``prompt`` (text for people), ``messages`` (a list of turns as JSON) and
    ``target`` ("" if there is none) of the prompt in ``row``, which has either a ``prompt`` or
    ``messages``. Raises DataError with file and line."""
    prompt, messages = row.fields.get("prompt"), row.fields.get("messages")
    turn = isinstance(prompt, str) and prompt.strip() and messages is None
    turns = prompt is None and isinstance(messages, list) and messages and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys()
        and isinstance(message["role"], str) and isinstance(message["content"], str)
        for message in messages
    )  # fmt: skip
    if not (turn or turns):
        raise DataError(
            f'{path}:{row.line}: not a prompt; write {{"prompt": TEXT}}, or {{"messages": '
            '[{"role": "user", "content": TEXT}, …]}'
        )
    target = row.fields.get("target")
    if not isinstance(target, str | None):
        raise DataError(
            f"{path}:{row.line}: target must be a text, not {target!r:.40}; put it into quotes"
        )
    if turn:
        messages = [{"role": "user", "content": prompt}]
    text = prompt if turn else "\n".join(f"{m['role']}: {m['content']}" for m in messages)
    return {"prompt": text, "messages": json.dumps(messages), "target": target or ""}


def evaluation_split(config: dict[str, Any]) -> str | None:
    """Return the split that lm-eval scores by the definition ``config``: test, or validation if
    there is no test split; None without either."""
    return config.get("test_split") or config.get("validation_split")


def fewshot_split(config: dict[str, Any]) -> str | None:
    """Return the split that few-shot examples come from by the definition ``config``:
    fewshot_config's, fewshot_split, training, validation or test, the first that is set. None
    without ``num_fewshot``, and if the definition lists its examples (fewshot_config.samples)."""
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


def _local_files(
    name: str,
    config: dict[str, Any],
    data: Path | None,
    files: Sequence[str] | None,
    fewshot_files: Sequence[str] | None,
) -> tuple[tuple[DataFile, ...], int | None]:
    """Return the task's data files and its number of documents; ((), None) without a data folder.
    Raises MissingDataError for the first split without a file."""
    makes_data = isinstance(config.get("custom_dataset"), Function)
    if data is None or (makes_data and not (data / name).is_dir()):
        return (), None
    split, examples = evaluation_split(config), fewshot_split(config)
    if split is None or "class" in config:
        raise DataError(
            f"{name}: it is defined in Python and loads its data itself; run it without a data "
            "folder"
        )
    stems_of = {split: tuple(files or (split,))}
    if examples and examples != split:
        stems_of[examples] = tuple(fewshot_files or (examples,))
    elif fewshot_files:
        why = f"its examples are drawn from {split}, which is scored; leave fewshot out"
        if not examples:
            why = "it draws no examples from a split; leave fewshot out"
            if not config.get("num_fewshot"):
                why += ", or set num_fewshot"
        raise RecipeError(f"tasks: {name}: files: fewshot names a file, but {why}")
    folder = data / name
    present = sorted(path.stem for path in folder.glob("*.jsonl"))
    data_files, documents = [], None
    for of, stems in stems_of.items():
        stem = next((stem for stem in stems if stem in present), None)
        if stem is None:
            names = " or ".join(f"{stem}.jsonl" for stem in stems)
            what = f"for its examples no {names}" if of == examples else f"no {names}"
            other = present[0] if present else "FILE"
            instead = f"{{fewshot: [{other}]}}" if of == examples else f"[{other}]"
            has = ", ".join(f"{stem}.jsonl" for stem in present) or "nothing"
            raise MissingDataError(
                f"{name}: {what} in {folder} (it has {has}); put the split "
                "there, one JSON object per line, with the field names of the hub's; or put "
                f"into the recipe tasks: [{{name: {name}, files: {instead}}}]"
            )
        path = folder / f"{stem}.jsonl"
        rows, digest = read_rows(path)
        data_files.append(DataFile(split=of, path=path, digest=digest))
        if of == split and not config.get("process_docs"):
            documents = len(rows)
    return tuple(data_files), documents


def _hub_data(name: str, config: dict[str, Any]) -> HubData | None:
    """Return the hub's data set; None for a task that loads its data by its own code or from files
    that its definition names."""
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
            f"{name}: {error}; try again, or put the data into "
            f"DIR/{name}/{evaluation_split(config)}.jsonl and add --data DIR"
        ) from error
    return HubData(repository=repository, name=config.get("dataset_name"), commit=commit)
