"""A recipe before it is checked: YAML with its line numbers.

YAML 1.2 by ruamel.yaml. The tree of nodes is looked through before any value is made of it,
so that aliases cannot grow into more than fits, and no tag makes anything but plain data.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from qbench.errors import RecipeError, shown
from qbench.files import reason

LARGEST = 256 * 1024  # bytes; the largest of ours has 2,000
MOST_VALUES = 10_000  # in a recipe, aliases written out
PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null")}  # noqa: E501  # fmt: skip
MERGE, DATE, WORD = (f"tag:yaml.org,2002:{name}" for name in ("merge", "timestamp", "str"))

Location = tuple[int | str, ...]  # as pydantic's ``loc``: ("checkpoints", "softmax", "path")


@dataclass(frozen=True, slots=True)
class Source:
    """A recipe's ``values``, and the ``lines`` of its file that they stand in, from 1."""

    path: Path
    values: dict[str, Any]
    lines: dict[Location, int]

    def at(self, location: Location) -> str:
        """``path:line`` of the innermost part of ``location`` that the file has."""
        for end in range(len(location), 0, -1):
            if location[:end] in self.lines:
                line = self.lines[location[:end]]
                return f"{self.path}:{line}" if line else str(self.path)
        return str(self.path)

    def replace(self, part: str, key: str, value: Any) -> None:
        """Put ``value`` in the place of ``part.key``; no line is named for it."""
        stated = self.values.get(part) or {}
        if not isinstance(stated, dict):
            location = self.at((part,))
            raise RecipeError(f"{location}: {part}: must be a mapping (it is {shown(stated)})")
        self.values[part] = {**stated, key: value}
        self.lines[part, key] = 0


def read(path: Path) -> Source:
    """Raises RecipeError, with the line, for what is no recipe-like YAML."""
    text = _text(path)
    try:
        return _parse(path, text)
    except RecursionError:
        raise RecipeError(f"{path}: nested too deeply") from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(f"{path}:{line}: {error.reason}") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        context = "" if (error.context or "while").startswith("while") else f"{error.context} "
        said = " ".join(f"{context}{error.problem or 'not YAML'}".split())
        raise RecipeError(f"{path}:{mark.line + 1 if mark else 1}: {said}") from None
    except YAMLError as error:
        raise RecipeError(f"{path}: {' '.join(str(error).split())}") from None


def _text(path: Path) -> str:
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise RecipeError(f"{path}: not a file; name a recipe, such as recipes/demo.yaml")
        if found.st_size > LARGEST:
            raise RecipeError(f"{path}: {found.st_size:,} bytes; a recipe has at most {LARGEST:,}")
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such recipe") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text ({error.reason})") from None
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path}: cannot be read ({reason(error)})") from None


def _parse(path: Path, text: str) -> Source:
    yaml = YAML(typ="safe", pure=True)
    root = yaml.compose(text)
    if not isinstance(root, MappingNode):
        raise RecipeError(
            f"{path}: a recipe is a mapping with name, checkpoints, quantizers, tasks"
        )
    nodes = _Nodes(path, yaml.constructor)
    nodes.look(root, ())
    return Source(path, yaml.constructor.construct_document(root), nodes.lines)


class _Nodes:
    """The tree before it is values: what is in it, how much, and in which lines."""

    def __init__(self, path: Path, constructor: Any) -> None:
        self.lines: dict[Location, int] = {}
        self._path = path
        self._constructor = constructor
        self._count = 0

    def look(self, node: Node, location: Location) -> None:
        """Raises RecipeError for a tag, key or value that no recipe has."""
        self._count += 1
        if self._count > MOST_VALUES:
            raise self._wrong(node, f"more than {MOST_VALUES:,} values, aliases written out")
        if node.tag == DATE:
            raise self._wrong(node, f"{shown(node.value)} is a date; put text into quotes")
        if node.tag not in PLAIN:
            raise self._wrong(node, f"tag {shown(str(node.tag))}: only plain values are read")
        if isinstance(node, ScalarNode):
            self._look_at_value(node)
        elif isinstance(node, SequenceNode):
            for number, part in enumerate(node.value):
                self.lines[*location, number] = _line(part)
                self.look(part, (*location, number))
        elif isinstance(node, MappingNode):
            self._look_at_mapping(node, location)

    def _look_at_mapping(self, node: MappingNode, location: Location) -> None:
        for key, value in node.value:
            if key.tag == MERGE:
                for merged in value.value if isinstance(value, SequenceNode) else [value]:
                    self.look(merged, location)
                continue
            if not isinstance(key, ScalarNode) or key.tag != WORD:
                raise self._wrong(key, "a key must be a word; put others into quotes")
            self.lines[*location, key.value] = _line(key)
            self.look(value, (*location, key.value))

    def _look_at_value(self, node: ScalarNode) -> None:
        try:
            self._constructor.construct_object(node)
        except ValueError:
            kind = str(node.tag).rpartition(":")[2]
            raise self._wrong(node, f"{shown(node.value)} is no {kind}") from None

    def _wrong(self, node: Node, message: str) -> RecipeError:
        return RecipeError(f"{self._path}:{_line(node)}: {message}")


def _line(node: Node) -> int:
    return node.start_mark.line + 1
