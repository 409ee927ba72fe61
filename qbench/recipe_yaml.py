"""Read and write recipes as YAML 1.2, and give each value its line for error messages."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.json_schema import SkipJsonSchema
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from qbench import removed
from qbench.errors import RecipeError, shown
from qbench.files import read_regular, reason, write_atomically
from qbench.records import DIGEST, LINE, NAME, TASK

LARGEST = 256 * 1024  # bytes; the largest of ours has 2,000
MOST_VALUES = 100_000  # with those of aliases, each time that one is used
TAG = "tag:yaml.org,2002:"
PATTERNS = {
    f"^{NAME}$": "letters, digits and . _ + - only, at most 64",
    LINE: "one line of text",
    TASK: "the name of a task, without / and line breaks",
    DIGEST: "a SHA-256, 64 hexadecimal digits",
}

Location = tuple[int | str, ...]  # as pydantic's ``loc``: ("checkpoints", "softmax", "path")


@dataclass(frozen=True, slots=True)
class Source:
    """Holds the ``values`` of a recipe and their lines in its file, counted from 1."""

    path: Path
    values: dict[str, Any]
    lines: dict[Location, int]

    def at(self, location: Location) -> str:
        """Return ``path:line`` of the innermost part of ``location`` that the file has."""
        for end in range(len(location), 0, -1):
            if location[:end] in self.lines:
                line = self.lines[location[:end]]
                return f"{self.path}:{line}" if line else str(self.path)
        return str(self.path)

    def replace(self, value: Any, *location: str) -> None:
        """Set the value of ``part`` or ``part.key``; messages then name no line for it."""
        part, *key = location
        if key:
            before = self.values.get(part) or {}
            if not isinstance(before, dict):
                place = self.at((part,))
                raise RecipeError(f"{place}: {part}: must be a mapping (it is {shown(before)})")
            value = {**before, key[0]: value}
        self.values[part] = value
        self.lines[location] = 0


def bundled_recipes() -> Path:
    """Return the folder of the recipes that come with qbench: in the package, else beside it."""
    in_wheel = Path(__file__).parent / "bundled"
    return in_wheel if in_wheel.is_dir() else Path(__file__).parents[1] / "recipes"


def find_recipe(path: Path) -> Path:
    """Return ``path``; if nothing is there and qbench comes with a recipe of that path, such as
    recipes/demo.yaml, return that one and say so on standard error."""
    if os.path.lexists(path) or path.parts[:1] != ("recipes",):
        return path
    bundled = bundled_recipes().joinpath(*path.parts[1:])
    if not bundled.is_file():
        return path
    print(f"{path}: not in this folder; the one that comes with qbench: {bundled}", file=sys.stderr)
    return bundled


def read(path: Path) -> Source:
    """Read a recipe's YAML. Raises RecipeError, with the line, for what is no mapping."""
    path = find_recipe(path)
    text = _text(path)
    yaml = YAML(typ="safe", pure=True)
    try:
        root = yaml.compose(text)
        if not isinstance(root, MappingNode):
            raise RecipeError(
                f"{path}: a recipe is a mapping with name, checkpoints, quantizers, tasks"
            )
        lines = _lines(path, root)
        return Source(path, yaml.constructor.construct_document(root), lines)
    except RecursionError:
        raise RecipeError(f"{path}: nested too deeply") from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(f"{path}:{line}: {error.reason}") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        context = "" if (error.context or "while").startswith("while") else f"{error.context} "
        message = " ".join(f"{context}{error.problem or 'not YAML'}".split())
        raise RecipeError(f"{path}:{mark.line + 1 if mark else 1}: {message}") from None
    except (YAMLError, ValueError, KeyError) as error:  # !!int foo, a date in the 13th month
        message = " ".join(str(error).split())
        raise RecipeError(f"{path}: a value cannot be read: {message}") from None


def write(path: Path, values: dict[str, Any], comment: str) -> None:
    """Write ``values`` as YAML to ``path``; ``read`` gives them again. Raises OutputError."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.allow_unicode, yaml.width = False, True, 100
    yaml.sort_base_mapping_type_on_output = False
    text = io.StringIO()
    yaml.dump(values, text)
    write_atomically(path, f"# {comment}\n{text.getvalue()}".encode())


def require_no_removed(source: Source) -> None:
    """Raise RecipeError for keys of earlier versions, with what took their place."""
    keys = {
        location: ".".join(part for part in location if isinstance(part, str))
        for location in source.lines
    }
    gone = [
        f"{source.at(location)}: {key} was removed: {removed.KEYS[key]}"
        for location, key in keys.items() if key in removed.KEYS
    ]  # fmt: skip
    if gone:
        raise RecipeError(*gone)


def problem_lines(source: Source, error: ValidationError, kind: type) -> list[str]:
    """Return one line per problem of ``error``, with its place in the recipe's file. ``kind`` is
    the recipe's class."""
    lines = []
    within = {p["loc"][:end] for p in error.errors() for end in range(len(p["loc"]))}
    for problem in error.errors():
        if problem["type"] == "too_short" and problem["loc"] in within:
            continue  # pydantic counts only items that are well; the others are told of
        location = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]
        ).lstrip(".")
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            keys = _known_keys(kind, problem["loc"][:-1])
            near = get_close_matches(str(problem["loc"][-1]), keys.split(": ")[1].split(", "), 1)
            message = f"unknown key; {f'did you mean {near[0]}? ' if near else ''}{keys}"
        elif problem["type"] in ("dataclass_type", "model_type", "dict_type"):
            message = f"must be a mapping; {_known_keys(kind, problem['loc'])} (it is "
            message += f"{shown(problem['input'])})"
        elif problem["type"] == "string_pattern_mismatch":
            allowed = PATTERNS[problem["ctx"]["pattern"]]
            message = f"must be {allowed} (it is {shown(problem['input'])})"
        elif problem["type"] not in ("value_error", "missing", "recipe"):
            message += f" (it is {shown(problem['input'])})"
        of = f"{location}: " if location else ""  # what is wrong with the whole names its keys
        lines.append(f"{source.at(problem['loc'])}: {of}{message}")
    return [" ".join(line.split("\n")) for line in lines]


def _known_keys(kind: Any, location: Location) -> str:
    """Return the keys that the mapping at ``location`` of a recipe of this ``kind`` may have."""
    for part in location:
        if part in kind.__pydantic_fields__:
            kind = _mapping(kind.__pydantic_fields__[part].annotation) or kind
    keys = [
        key
        for key, field in kind.__pydantic_fields__.items()
        if not any(isinstance(mark, SkipJsonSchema) for mark in field.metadata)
    ]
    return "known: " + ", ".join(keys)


def _mapping(annotation: Any) -> Any:
    """Return the first class with keys in a type hint; None if it has none."""
    if hasattr(annotation, "__pydantic_fields__"):
        return annotation
    return next(filter(None, map(_mapping, get_args(annotation))), None)


def _text(path: Path) -> str:
    try:
        return read_regular(path, most=LARGEST).decode("utf-8-sig")
    except FileNotFoundError:
        raise RecipeError(
            f"{path}: no such recipe; `qbench list recipes` names those that come with qbench"
        ) from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text ({error.reason})") from None
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path}: cannot be read ({reason(error)})") from None


def _lines(path: Path, root: MappingNode) -> dict[Location, int]:
    """Return the line of every value; of an alias, that of its anchor.

    Raises RecipeError for a key that no recipe has, for an alias within its own anchor, and for
    aliases that stand for more than ``MOST_VALUES`` values.
    """
    lines: dict[Location, int] = {}
    counts: dict[int, int] = {}  # values that a node stands for; 0 while they are counted

    def look(node: Node, location: Location) -> int:
        if isinstance(node, ScalarNode):
            return 1
        if id(node) not in counts:
            counts[id(node)] = 0
            counts[id(node)] = 1 + sum(parts(node, location))
        count, line = counts[id(node)], node.start_mark.line + 1
        if count == 0:
            raise RecipeError(f"{path}:{line}: an alias refers to what it is part of")
        if count > MOST_VALUES:
            raise RecipeError(f"{path}:{line}: aliases stand for more than {MOST_VALUES:,} values")
        return count

    def parts(node: Node, location: Location) -> Iterator[int]:
        if isinstance(node, SequenceNode):
            for number, part in enumerate(node.value):
                lines[*location, number] = part.start_mark.line + 1
                yield look(part, (*location, number))
        for key, value in node.value if isinstance(node, MappingNode) else ():
            line = key.start_mark.line + 1
            if key.tag not in (f"{TAG}str", f"{TAG}merge"):
                raise RecipeError(f"{path}:{line}: a key must be a word; put others into quotes")
            lines[*location, key.value] = line
            yield look(value, (*location, key.value))

    look(root, ())
    return lines
