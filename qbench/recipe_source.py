"""A recipe before it is checked: YAML with its line numbers, and what replaces parts of it.

YAML 1.2 by ruamel.yaml. The tree of nodes is looked through before any value is made of it,
so that aliases cannot grow into more than fits, and no tag makes anything but plain data.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from qbench.checkpoints.find import HUB_ID
from qbench.errors import RecipeError, shown
from qbench.files import reason
from qbench.overrides import Overrides

UNQUANTIZED = ("bf16", "fp16", "fp32")
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

    def override(self, changed: Overrides) -> None:
        """Put what the command line says into the place of what the file says."""
        try:
            self._replace_checkpoints({k: self._found(v) for k, v in changed.checkpoints.items()})
            if changed.data is not None:
                self.values["data"] = os.path.realpath(changed.data)
                self.lines["data",] = 0
            if changed.calibration is not None:
                self.replace("calibration", "path", os.path.realpath(changed.calibration))
        except (OSError, ValueError) as error:
            raise RecipeError(f"a path that an option names is none ({reason(error)})") from None
        if changed.limit is not None:
            self.replace("evaluation", "limit", changed.limit)
        if changed.scoring is not None:
            self.replace("evaluation", "scoring", str(changed.scoring))
        if changed.dtype is not None:
            self._replace_dtype(changed.dtype)

    def group_checkpoints(self, folder: Path) -> None:
        """Take apart checkpoints that stand for several trainings of one kind, a list or a path
        with ``*`` (relative to ``folder``): ``softmax`` becomes ``softmax.1``, ``softmax.2``, …,
        and a group of ``replicates``. Raises RecipeError where fewer than two are found."""
        declared = self.values.get("checkpoints")
        if not isinstance(declared, dict):
            return  # the schema says so, with its location
        made: dict[str, Any] = {}
        groups: dict[str, list[str]] = {}
        for name, entry in declared.items():
            members = _members(entry, folder)
            if members is None:
                made[name] = entry
                continue
            location = self.at(("checkpoints", name))
            if len(members) < 2:
                raise RecipeError(
                    f"{location}: checkpoints.{name}: {shown(entry)} gives {len(members)} "
                    "checkpoints; seeds of one kind are two or more"
                )
            groups[name] = [f"{name}.{number}" for number in range(1, len(members) + 1)]
            for member, one in zip(groups[name], members, strict=True):
                made[member] = one
                self.lines["checkpoints", member] = self.lines.get(("checkpoints", name), 0)
        if groups:
            self.values["checkpoints"] = made
            stated = self.values.get("replicates") or {}
            self.values["replicates"] = {**stated, **groups} if isinstance(stated, dict) else stated

    def _found(self, source: str) -> str:
        """An absolute path for a folder, and for what is no hub id either: a command line's paths
        are relative to where it is given, not to the recipe. A hub id as it is."""
        path = os.path.expanduser(source)
        if os.path.isdir(path) or not HUB_ID.fullmatch(source):
            return os.path.realpath(path)
        if os.path.isdir(os.path.join(os.path.dirname(os.path.realpath(self.path)), source)):
            raise RecipeError(
                f"--checkpoint {source}: no such folder here, but one beside {self.path}; name it "
                "by its path from here"
            )
        return source

    def replace(self, part: str, key: str, value: Any) -> None:
        """Put ``value`` in the place of ``part.key``; no line is named for it."""
        stated = self.values.get(part) or {}
        if not isinstance(stated, dict):
            location = self.at((part,))
            raise RecipeError(f"{location}: {part}: must be a mapping (it is {shown(stated)})")
        self.values[part] = {**stated, key: value}
        self.lines[part, key] = 0

    def _replace_checkpoints(self, sources: Mapping[str, str]) -> None:
        """Other paths for checkpoints of the recipe; what else it says of them stays, but the
        revision. Raises RecipeError for one that it does not have, or has no path for."""
        declared = self.values.get("checkpoints", {})
        if not isinstance(declared, dict):
            return  # the schema says so, with its location
        for name, source in sources.items():
            if name not in declared:
                known = ", ".join(map(str, declared)) or "none"
                raise RecipeError(
                    f"--checkpoint {name}={source}: {self.path} has no {name}; it has {known}"
                )
            stated = declared[name] if isinstance(declared[name], dict) else {}
            kept = {k: v for k, v in stated.items() if k not in ("path", "revision")}
            declared[name] = {**kept, "path": source}
            self.lines["checkpoints", name, "path"] = 0
        for name, source in declared.items():
            if source is None:
                raise RecipeError(
                    f"{self.at(('checkpoints', name))}: checkpoints.{name}: no default is known; "
                    f"say --checkpoint {name}=FOLDER_OR_HUB_ID"
                )

    def _replace_dtype(self, dtype: str) -> None:
        """Compute in ``dtype`` everywhere. Unquantized columns become those of that dtype, each
        with its label."""
        self.values["compute_dtype"] = dtype
        unquantized = {"bfloat16": "bf16", "float32": "fp32"}[dtype]
        quantizers = self.values.get("quantizers")
        if not isinstance(quantizers, list):
            return  # the schema says so, with its location
        changed: list[Any] = []
        for entry in quantizers:
            entry = _in_dtype(entry, unquantized)
            if isinstance(entry, dict) and "weights" in entry:
                entry["weights"] = _in_dtype(entry["weights"], unquantized)
            changed.append(entry)
        if changed.count(unquantized) > 1:
            raise RecipeError(
                f"--dtype {dtype}: {self.at(('quantizers',))}: quantizers: bf16 and fp32 would "
                f"both be {unquantized}; take one out, or give each a label"
            )
        self.values["quantizers"] = changed


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


def _in_dtype(entry: Any, unquantized: str) -> Any:
    """A quantizer of a recipe without a dtype of its own, or ``unquantized``."""
    if isinstance(entry, dict):
        entry = {k: v for k, v in entry.items() if k not in ("compute_dtype", "dtype")}
        if entry.get("name") in UNQUANTIZED:
            entry["name"] = unquantized
        return entry
    return unquantized if entry in UNQUANTIZED else entry


def _members(entry: Any, folder: Path) -> list[Any] | None:
    """The checkpoints that one entry stands for; None for an entry of a single one."""
    if isinstance(entry, list):
        return entry
    path = entry.get("path") if isinstance(entry, dict) else entry
    if not isinstance(path, str) or "*" not in path:
        return None
    found = sorted(glob.glob(os.path.expanduser(path), root_dir=folder))
    found = [one for one in found if os.path.isdir(folder / one)]
    return [{**entry, "path": one} if isinstance(entry, dict) else one for one in found]


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
