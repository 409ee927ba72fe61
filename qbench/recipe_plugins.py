"""Plug-in files that a recipe names, and those that a saved one has to. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ValidationError

from qbench.errors import RecipeError, RecipeProblems
from qbench.plugins import load_file, loaded
from qbench.recipe_fields import FilePath, Strict, problem_lines
from qbench.recipe_source import Source
from qbench.records import Digest


class PluginFile(Strict):
    """A Python file, and where stated the SHA-256 that it must have."""

    path: FilePath
    sha256: Digest | None = None


def _with_path(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


PluginFiles = tuple[Annotated[PluginFile, BeforeValidator(_with_path)], ...]


class _Named(BaseModel):
    plugins: PluginFiles = ()


def load_plugins(source: Source, folder: Path) -> None:
    """Load the files that a recipe names, so that it can name what they register.

    Raises RecipeError for one that does not load, or is not the one that the recipe states.
    """
    try:
        named = _Named.model_validate({"plugins": source.values.get("plugins", ())}).plugins
    except ValidationError as error:
        lines = problem_lines(
            source, error, lambda _: "known: " + ", ".join(PluginFile.model_fields)
        )
        raise RecipeProblems(lines) from None
    for number, one in enumerate(named):
        location = f"{source.at(('plugins', number))}: plugins[{number}]"
        try:
            plugin = load_file(folder / one.path.expanduser(), location=location)
        except RuntimeError as error:  # ~nobody
            raise RecipeError(f"{location}: {error}") from None
        if one.sha256 not in (None, plugin.digest):
            raise RecipeError(
                f"{location}: {plugin.path} is another file than the recipe states, its SHA-256 is "
                f"{plugin.digest}; state that, or leave sha256 out, to run what it is now"
            )


def named_plugins() -> list[dict[str, str]]:
    """The files that were loaded in this process, as a recipe names them."""
    return [{"path": plugin.path, "sha256": plugin.digest} for plugin in loaded()]
