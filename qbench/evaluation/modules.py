"""Python packages that a task's own code imports, looked for without importing them. No torch."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from qbench.errors import DataError
from qbench.evaluation.definitions import Definition


def require_modules(name: str, definition: Definition) -> None:
    """Raises DataError where the code of a task's functions imports what is not installed."""
    files = {function.file for function in definition.functions if function.file is not None}
    for path in sorted(files):
        for line, module in _imported(path):
            if (missing := _missing(module, path.parent)) is not None:
                raise DataError(missing_module(name, missing, f"{path}:{line}"))


def missing_module(task: str, module: str, location: str) -> str:
    """One line for a task whose code imports ``module`` at ``location`` and does not find it."""
    package = module.partition(".")[0]
    if package != module and importlib.util.find_spec(package) is not None:
        return (
            f"{task}: its code in {location} imports {module}, which the installed {package} does "
            "not have (any more); leave the task out"
        )
    return (
        f"{task}: its code in {location} imports {package}, which is not installed: "
        f"pip install {package}"
    )


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of the modules that a file imports whenever it is imported itself."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return  # lm-eval says so, with the line
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            yield from ((statement.lineno, alias.name) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.lineno, statement.module


def _missing(module: str, folder: Path) -> str | None:
    """The first part of ``module`` that is nowhere, or None. Only the top package's finder is
    asked: to find what is inside, Python would import it."""
    names = module.split(".")
    if (folder / names[0]).exists() or (folder / f"{names[0]}.py").exists():
        return None
    try:
        found = importlib.util.find_spec(names[0])
    except (ImportError, ValueError):
        return names[0]
    if found is None:
        return names[0]
    paths = [Path(path) for path in found.submodule_search_locations or ()]
    for depth, part in enumerate(names[1:], start=2):
        if not paths:
            return None  # a module, or a package made at run time: only importing tells
        inside = [entry for path in paths for entry in path.glob(f"{part}*")]
        if not any(entry.name.partition(".")[0] == part for entry in inside):
            return ".".join(names[:depth])
        paths = [entry for entry in inside if entry.is_dir() and entry.name == part]
    return None
