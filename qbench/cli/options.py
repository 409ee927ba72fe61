"""Define commands, whose options are explained in their docstrings, and the options that several
commands have."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from qbench.errors import OutputError, RecipeError
from qbench.files import require_writable
from qbench.plugins import load_file

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


def _path(text: str) -> Path:
    if not text:
        raise OutputError("an empty path: name a file or folder to write, or leave the option out")
    return Path(os.path.expanduser(text))  # the shell leaves the ~ of --out=~/results


def _writable(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """Return ``value``, a file to write; refuse the command if it cannot be written."""
    if value is not None:
        require_writable(value, param.opts[0])
    return value


def _output(metavar: str, help: str = "") -> Any:
    """Return a typer option for a path to write. A FILE is checked here; a command that writes a
    FOLDER checks it before work."""
    check = _writable if metavar == "FILE" else None
    return typer.Option(help=help, parser=_path, callback=check, metavar=metavar)


class _Command(TyperCommand):
    """A command that refuses a list of names that is given twice: click takes the last option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names = [word.partition("=")[0] for word in args]
        for option in self.params:
            if option.metavar in ("NAMES", "PATTERNS") and sum(map(names.count, option.opts)) > 1:
                raise typer.BadParameter("given twice; join its values by commas", ctx, option)
        return super().parse_args(ctx, args)


class CommandGroup(typer.Typer):
    """A group of commands, or the holder of a single one.

    The last sections of a command's docstring are ``Examples:`` and ``Options:``, a line per
    parameter: its help. Lines that go on are indented. A parameter ``overrides`` becomes the
    options that replace parts of a recipe, all or those that its annotation names, and --plugin.
    """

    def __init__(self, help: str = "") -> None:
        super().__init__(
            add_completion=False, no_args_is_help=bool(help), rich_markup_mode="markdown", help=help
        )

    def register(
        self, command: Callable[..., None], name: str | None = None
    ) -> Callable[..., None]:
        """Add a command to the group as ``name``, by default the function's, and return it. Flags
        that default to False get no ``--no-``."""
        about, _, section = (inspect.getdoc(command) or "").partition("\n\nOptions:\n")
        about = re.sub(r"(?<=\nExamples:\n)(.+)", r"```\n\1\n```", about, flags=re.DOTALL)
        entries = (line.partition(": ") for line in re.sub(r"\n +", " ", section).splitlines())
        help = {parameter: text for parameter, _, text in entries}
        parameters: list[inspect.Parameter] = []
        chosen: tuple[str, ...] = ()  # fields of Overrides
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            if parameter.name == "overrides":
                from qbench.recipe import Overrides  # half a second: other commands need none

                chosen = get_args(parameter.annotation)[1:] or tuple(Overrides.model_fields)
                options = {name: _option(Overrides.model_fields[name]) for name in chosen}
                options["plugin"] = PluginOption
                parameters += [
                    parameter.replace(name=name, default=None, annotation=options[name])
                    for name in (*chosen, "plugin")
                ]
            else:
                annotation = _with_help(parameter, help.get(parameter.name))
                parameters.append(parameter.replace(annotation=annotation))

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            if chosen:
                del values["plugin"]  # was loaded while the options were read
                try:
                    values["overrides"] = Overrides(**{name: values.pop(name) for name in chosen})
                except RecipeError as error:
                    field, _, why = str(error).partition(": ")
                    option = "checkpoint" if field == "checkpoints" else field.replace("_", "-")
                    raise RecipeError(f"--{option}: {why}") from None
            command(**values)

        # what typer reads
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # ours
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        self.command(name or command.__name__, cls=_Command, help=about)(wrapper)
        return command


def _with_help(parameter: inspect.Parameter, help: str | None) -> Any:
    """Return the annotation of a command's parameter with this help."""
    if help is None:
        return parameter.annotation
    kind, *settings = (
        get_args(parameter.annotation)
        if get_origin(parameter.annotation) is Annotated
        else (parameter.annotation,)
    )
    flag = [f"--{parameter.name.replace('_', '-')}"] if parameter.default is False else []
    option = copy.copy(settings[0]) if settings else typer.Option(*flag)
    option.help = help
    return Annotated[kind, option]


NewFile = Annotated[Path | None, _output("FILE")]
NewFolder = Annotated[Path | None, _output("FOLDER")]
RecipeFile = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A recipe, such as recipes/gptq.yaml.")
]
Folder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="A results folder that `qbench run` wrote.")
]
RecipeOrOptions = Annotated[
    Path | None,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe, such as recipes/gptq.yaml. Without one, give --checkpoint, --quantizers "
        "and --tasks.",
    ),
]
Only = Annotated[
    str | None,
    typer.Option(
        metavar="PATTERNS",
        help="Only cells whose names match one of these patterns: `'softpick/gptq-*,*/bf16'`.",
    ),
]
Out = Annotated[
    Path | None, _output("FOLDER", "Results folder. Default: results/NAME of the recipe.")
]


def _load_plugins(paths: list[Path] | None) -> None:
    """Load plug-ins while options are read, so that other options can name what they register."""
    for path in paths or ():
        load_file(path)


PluginOption = Annotated[
    list[Path] | None,
    typer.Option(
        parser=_path,
        callback=_load_plugins,
        is_eager=True,
        metavar="FILE",
        help="Python file that registers quantizers or normalizers of your own; may be repeated.",
    ),
]
DeviceOption = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Device to compute on.")]
Json = Annotated[Path | None, _output("FILE", "Also write JSON here, and the table beside it.")]


def _option(part: FieldInfo) -> Any:
    """Return the typer option for a field of Overrides."""
    settings = dict(part.json_schema_extra["option"])
    flags = [settings.pop("flag")] if "flag" in settings else []
    kind = settings.pop("type", part.annotation)
    option = typer.Option(*flags, help=" ".join(part.description.split()), **settings)
    return Annotated[kind, option]
