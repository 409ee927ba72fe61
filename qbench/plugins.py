"""Register quantizers and normalizers by name, and load plug-ins. Imports no torch.

A plug-in is a Python file, named by ``--plugin`` or a recipe's ``plugins``, which registers objects
on import (``qbench.quantizers.register``, ``qbench.attention.normalizers.register``).
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import traceback
import types
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from qbench.errors import RecipeError, first_line, shown
from qbench.files import NAME, NAME_RULE, digest, reason

PREFIX = "qbench_plugin_"  # of the modules that files become
PATH = 500  # characters of a path in a message
T = TypeVar("T")


class Registry(dict[str, T]):
    """Maps names to objects of one ``kind``. A name is at most 64 letters, digits and . _ + -, the
    first a letter or digit, since it becomes part of recipes, tables and paths. Raises RecipeError
    for an unknown name, ValueError for a name that is registered twice."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def add(self, name: str, thing: T) -> T:
        """Register ``thing`` under ``name``, and return it. Raises RecipeError for a text that is
        no name, ValueError for a name that is taken."""
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            raise RecipeError(f"{self.kind} {shown(name)}: its name must have {NAME_RULE}")
        if name in self:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self[name] = thing
        return thing

    def __missing__(self, name: str) -> NoReturn:
        """Raise RecipeError for an unknown name, which lists all names."""
        names = ", ".join(self) or "none; --plugin FILE registers one"
        raise RecipeError(f"unknown {self.kind} {name!r}; known: {names}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """Holds a plug-in file that was loaded. It can be pickled, for ``load`` in another process."""

    name: str  # of the file
    source: bytes
    path: str = ""  # on the host where it was read

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the file's bytes."""
        return digest(self.source)

    @property
    def module(self) -> str:
        """Return the name under which Python imports the file."""
        return PREFIX + re.sub(r"\W", "_", Path(self.name).stem)


_loaded: dict[str, Plugin] = {}


def load_file(path: Path, *, location: str = "--plugin") -> Plugin:
    """Import the plug-in file ``path``, unless this process has done so, and return it;
    ``location`` begins error messages. Raises RecipeError if the file cannot be read or fails, or
    if another file of this name is loaded."""
    try:
        source = path.read_bytes()
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"{location} {shown(str(path), most=PATH)}: cannot be read ({reason(error)}); name a "
            "Python file"
        ) from None
    plugin = Plugin(name=Path(path).name, source=source, path=os.path.realpath(path))
    load([plugin], location=location)
    return plugin


def load(plugins: Iterable[Plugin], *, location: str = "--plugin") -> None:
    """Import the plug-ins that this process has not imported yet. Raises RecipeError, beginning
    with ``location``, if one fails or another of its name is loaded."""
    for plugin in plugins:
        before = _loaded.get(plugin.module)
        if before is not None and before.source == plugin.source:
            continue
        if before is not None:
            raise RecipeError(
                f"{location} {plugin.path or plugin.name}: another plug-in named {before.name} is "
                "loaded already; rename this one"
            )
        # Run the file as a module, so that its classes can be pickled and inspect finds its source
        # on another host too
        path = plugin.path or plugin.name
        module = sys.modules[plugin.module] = types.ModuleType(plugin.module)
        module.__file__ = path
        try:
            lines = plugin.source.decode().splitlines(keepends=True)
            linecache.cache[path] = (len(plugin.source), None, lines, path)
            exec(compile(plugin.source, path, "exec"), module.__dict__)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit, too, is no reason to end without a word
            del sys.modules[plugin.module]
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == path] or ["?"]
            line = error.lineno if isinstance(error, SyntaxError) else lines[-1]
            raise RecipeError(
                f"{location} {path}: line {line}: {type(error).__name__}: {first_line(error)}; "
                "correct the file"
            ) from error
        _loaded[plugin.module] = plugin


def loaded() -> tuple[Plugin, ...]:
    """Return the plug-in files that this process has loaded."""
    return tuple(_loaded.values())


def source_digest(kind: type) -> str:
    """Return the SHA-256 of the source file of the class ``kind``."""
    plugin = _loaded.get(kind.__module__)
    if plugin is not None:
        return plugin.digest
    return digest(Path(sys.modules[kind.__module__].__file__ or "").read_bytes())
