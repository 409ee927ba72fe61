"""The command line: each command a few lines over a public function."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated, Any

import typer

from qbench import __version__
from qbench.cli import analyze, bench, caching, gate, models, noise, results, run, train
from qbench.cli.options import PluginOption
from qbench.cli.screen import complain, refuse
from qbench.cli.worded import WordedGroup
from qbench.errors import INTERRUPTED, STOPPED, QbenchError, RecipeError, shown
from qbench.machine import settle
from qbench.plugins import load_packages

settle()


class Commands(WordedGroup):
    """Ctrl-C in a command has an exit code of its own, whatever typer's version makes of it."""

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None

    def main(self, *args: Any, standalone_mode: bool = True, **options: Any) -> Any:
        """Wrong use is one line, too: where, what, and what to do."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **options)
        try:
            code = super().main(*args, standalone_mode=False, **options)
        except Exception as error:
            if not hasattr(error, "format_message"):  # click's, which some versions of typer hold
                raise
            complain(_usage(error, sys.argv[1:]))
            sys.exit(2)
        sys.exit(code if isinstance(code, int) else 0)


def _usage(error: Any, arguments: list[str]) -> str:
    """One line on a wrong use of the command line."""
    names, context = [], getattr(error, "ctx", None)
    while context is not None and context.parent is not None:
        names.insert(0, context.info_name)
        context = context.parent
    if not names:  # an option without its value: click says of no command
        known = typer.main.get_command(app).commands
        names = [name for name in arguments[:1] if name in known]
    command = " ".join(["qbench", *names])
    said = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.ctx.get_help(), err=True)
        said = "no command was given"
    return f"{command}: {said}; `{command} --help` shows what there is"


app = typer.Typer(
    name="qbench",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="How much does a quantizer hurt a softpick model, how much a softmax model, and is the "
    "difference real?\n\nStart with `qbench run recipes/demo.yaml`.",
)
for _command in (run.run, run.plan, noise.noise, analyze.analyze):
    app.command(rich_help_panel="Run recipes")(_command)
for _command in (
    results.tables,
    results.report,
    results.show,
    results.export,
    gate.check,
    gate.baseline,
    gate.compare,
    results.explain,
    results.published,
):
    app.command(rich_help_panel="Read results")(_command)
for _command in (train.tokenize, train.train):
    app.command(rich_help_panel="Train pairs")(_command)
app.command(rich_help_panel="Measure and look up")(models.convert)
app.add_typer(caching.app, name="cache", rich_help_panel="Measure and look up")
app.add_typer(bench.app, name="bench", rich_help_panel="Measure and look up")


class Listing(StrEnum):
    quantizers = "quantizers"
    normalizers = "normalizers"
    models = "models"
    tasks = "tasks"


@app.command("list", rich_help_panel="Measure and look up")
def list_command(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="quantizers, normalizers, models or tasks.")
    ],
    plugin: PluginOption = [],  # noqa: B006  typer copies it
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The models as the table of docs/models.md.")
    ] = False,
) -> None:
    """List the quantizers with their options, the normalizers, the classes of models that were
    tried, or lm-eval's tasks."""
    if what not in list(Listing):
        raise typer.BadParameter(
            f"{shown(what)} is none of {', '.join(Listing)}", param_hint="WHAT"
        )
    load_packages()
    if markdown and what != Listing.models:
        raise RecipeError(f"list {what}: --markdown is for models")
    if markdown:
        from qbench.cli.models import model_table

        typer.echo(model_table(), nl=False)
        return
    for line in _listing(Listing(what)):
        typer.echo(line)


def _listing(what: Listing) -> list[str]:
    if what is Listing.tasks:
        from qbench.evaluation.definitions import task_names

        return ["passkey", "passkey_TOKENS (qbench's own, without data)", *task_names()]
    if what is Listing.models:
        from qbench.cli.models import model_lines

        return model_lines()
    if what is Listing.normalizers:
        from qbench.attention.normalizers import NORMALIZERS

        known = [NORMALIZERS.get(name) for name in NORMALIZERS]
        wide = max(len(one.name) for one in known)
        lines = [
            line
            for one in known
            for line in (f"{one.name:{wide}} {one.description}", f"{'':{wide}}   {one.traits}")
        ]
        own = "what a model's own class in transformers computes, by its own code"
        return [*lines, f"{'native':{wide}} {own}"]
    from qbench.cli.parts import quantizer_lines

    return quantizer_lines()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"qbench {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


def main() -> None:
    """Entry point: one line and exit code 2 for what a user can put right, and for what the
    machine refuses: a full disk, no permission, no memory. One line on Ctrl-C, too."""
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            complain(STOPPED)
        raise
    except (QbenchError, OSError, UnicodeError, MemoryError, ImportError) as error:
        refuse(error)
