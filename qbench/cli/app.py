"""List the commands of the command line. A command's module is imported when it is called. Errors
and the files that were written are said on standard error."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from qbench import __version__, removed
from qbench.cli.options import CommandGroup
from qbench.errors import INTERRUPTED, STOPPED, OutputError, QbenchError, shown
from qbench.files import write_atomically
from qbench.machine import set_library_env

if TYPE_CHECKING:
    from qbench.store import Store


def complain(line: str) -> None:
    """Print one line on standard error, in red if the terminal can; escape unprintable characters,
    such as a line break in a path.
    """
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    console = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
    console.print(text, style="bold red", markup=False)


def refuse(error: Exception) -> NoReturn:
    """Print what was wrong, one line per problem, and end with exit code 2."""
    with suppress(OSError):  # standard error may be on the full disk, too
        line = str(error) or type(error).__name__
        for each in error.lines if isinstance(error, QbenchError) else [line]:
            complain(each)
    sys.exit(2)


def show_written(paths: list[Path]) -> None:
    """Print which files a command wrote, on standard error so that output can be piped."""
    typer.echo("written: " + ", ".join(str(path) for path in paths), err=True)


def show_tables(
    store: Store, *, format: str = "md", published: str | None = None, against: str | None = None
) -> None:
    """Print and write tables as the command ``tables`` does with these options. If the folder
    cannot be written, say so and print only."""
    from qbench.comparison.compare import compare  # scipy: no other command waits for it
    from qbench.tables import summary, table_files

    comparison = compare(store, against=against)
    formats = ("md", "csv") if format == "md" else (format,)
    files = table_files(comparison, formats, published=published)
    typer.echo(summary(comparison) if format == "md" else files[f"tables.{format}"], nl=False)
    try:
        for name, text in files.items():
            write_atomically(store.directory / name, text.encode())
        show_written([store.directory / name for name in files])
    except OutputError as error:
        typer.echo(f"tables are only printed: {error}", err=True)


RUN, READ = "Run recipes", "Read results"
TRAIN, LOOK_UP = "Train pairs", "Measure and look up"


class Entry(NamedTuple):
    """Holds a command's module in qbench.cli, its panel in ``qbench --help`` and its help line."""

    module: str
    panel: str
    about: str


COMMANDS = {
    "run": Entry("run", RUN, "Quantize, audit and score every cell; write records and tables."),
    "plan": Entry("run", RUN, "Show what a run would do, its time and memory. Runs nothing."),
    "analyze": Entry("analyze", RUN, "Measure attention sinks, outliers, sparsity and inputs."),
    "budget": Entry("budget", RUN, "Choose each layer's width under a budget of bits; test it."),
    "tables": Entry("results", READ, "Write and show the tables of a results folder."),
    "view": Entry("view", READ, "Show results in a browser, down to one document's tokens."),
    "show": Entry("show", READ, "Everything about one cell."),
    "export": Entry("show", READ, "Write results in others' formats, or a quantized model."),
    "check": Entry("results", READ, "The CI gate: is any score worse than the baseline's?"),
    "baseline": Entry("results", READ, "Make the baseline that `qbench check` compares with."),
    "explain": Entry("show", READ, "Show in which parts the keys of two cells differ."),
    "tokenize": Entry("train", TRAIN, "Turn text into token files for `qbench train`."),
    "train": Entry("train", TRAIN, "Train models that differ only in the normalizer."),
    "list": Entry("lookup", LOOK_UP, "List quantizers, normalizers, models or tasks."),
    "bench": Entry("bench", LOOK_UP, "Measure speeds, after checking results."),
}

set_library_env()


@functools.cache
def load(name: str) -> Any:
    """Import and return the command or command group ``name``."""
    module = importlib.import_module(f"qbench.cli.{COMMANDS[name].module}")
    function = getattr(module, name if hasattr(module, name) else f"{name}_command")
    group = function
    if not isinstance(function, typer.Typer):
        group = CommandGroup()
        group.register(function, name)
    command = typer.main.get_command(group)
    command.name = name
    return command


class Commands(TyperGroup):
    """The group of all commands. Ctrl-C ends it in one line with exit code 130."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load(cmd_name) if cmd_name in COMMANDS else None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        TyperGroup.format_help(self._listing(), ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        return TyperGroup.shell_complete(self._listing(), ctx, incomplete)

    def _listing(self) -> Commands:
        """Return a copy whose commands have name and help only, so that listing imports nothing."""
        listing = copy.copy(self)
        listing.get_command = lambda ctx, name: TyperCommand(
            name, help=COMMANDS[name].about, rich_help_panel=COMMANDS[name].panel
        )
        return listing

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            complain(STOPPED)
            raise typer.Exit(INTERRUPTED) from None


def _usage(error: Any) -> str:
    """Return one line for click's ``error``: the command, what is wrong, and how to get help."""
    context, param, words = getattr(error, "ctx", None), getattr(error, "param", None), sys.argv[1:]
    # of an option without its value click does not say the command
    command = context.command_path if context else " ".join(["qbench", *words[:1]])
    line = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    option = str(getattr(error, "option_name", None) or (param.opts[-1] if param else ""))
    option = option.replace("_", "-")
    for name in (option, *words[:1]):
        if answer := removed.COMMAND_LINE.get(name):
            line = f"{name} was removed: {answer}"
        elif key := removed.RECIPE_KEYS.get(name):
            line = f"{name} is a key of a recipe: {key}; --save-recipe FILE writes the recipe of "
            line += "options"
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(context.get_help(), err=True)
        line = "no command was given"
    return f"{command}: {line}; `{command} --help` lists what is possible"


app = typer.Typer(
    name="qbench",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="How much does quantization hurt my model, and is the difference real?\n\n"
    "Start with `qbench run recipes/demo.yaml`.",
)


def _version(given: bool) -> None:
    if given:
        typer.echo(f"qbench {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


def main() -> None:
    """Run the command line. Input errors, wrong use and refusals of the machine (a full disk, no
    permission, no memory) are one line and exit code 2."""
    try:
        code = app(prog_name="qbench", standalone_mode=False)
    except SystemExit as end:  # a plug-in's or a library's, unless typer completed a word, or
        if "_QBENCH_COMPLETE" in os.environ or isinstance(end.__context__, BrokenPipeError):
            raise  # the reader of the output has gone
        complain(f"a plug-in or a library ended the command by sys.exit({shown(end.code)})")
        sys.exit(1)
    except (QbenchError, OSError, UnicodeError, MemoryError) as error:
        refuse(error)
    except Exception as error:
        if not hasattr(error, "format_message"):  # click's, which some versions of typer hold
            raise
        complain(_usage(error))
        sys.exit(2)
    sys.exit(code or 0)
