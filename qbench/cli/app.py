"""The command line: its commands put together, and those of the cache and of lists."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qbench import __version__
from qbench.cli import analyze, bench, results, run, train
from qbench.cli import view as pages
from qbench.cli.options import PluginOption, WordedGroup, complain, refuse, show_written
from qbench.errors import INTERRUPTED, STOPPED, QbenchError, RecipeError, shown
from qbench.machine import settle
from qbench.plugins import load_packages

if TYPE_CHECKING:
    from qbench.checkpoints.supported import ModelClass
    from qbench.quantizers.names import Preset, Presets

WIDTH = 22
ABOUT = {
    "weights": "by its name alone, or as weights: of an entry in parts",
    "activations": "what linear layers take in, the LM head aside",
    "kv": "keys and values that attention reads",
    "outliers": "changes the model to an equal one that is easier to quantize",
    "prune_heads": "attention heads that are cut out",
}
EXAMPLE = "{weights: gptq-4bit, activations: int8-token, kv: int4-token, label: w4a8kv4}"


def quantizer_lines() -> list[str]:
    """Parts and ready combinations, one line a name and one an option."""
    from qbench.quantizers.names import COMBINATIONS, PARTS

    lines = [f"a quantizer of a recipe is a name, or has parts: {EXAMPLE}", ""]
    for kind, about in ABOUT.items():
        lines += [f"{kind}: {about}", *_of(PARTS[kind]), ""]
    lines.append("combinations: several parts under one name, each of which may be stated anew")
    for name in COMBINATIONS:
        one = COMBINATIONS.get(name)
        parts = ", ".join(f"{kind}: {_shown(part)}" for kind, part in one.parts.items())
        lines += [f"{name:{WIDTH}} {one.description}", f"{'':{WIDTH}}   {{{parts}}}"]
    return lines


def _of(registry: Presets) -> list[str]:
    """Options are explained where they first stand."""
    lines: list[str] = []
    explained: list[Preset] = []
    for preset in map(registry.get, registry):
        lines.append(f"{preset.name:{WIDTH}} {preset.description}")
        same = (o for o in explained if o.kind is preset.kind and o.options == preset.options)
        first = next(same, None)
        if first and preset.options:
            lines.append(f"{'':{WIDTH}}   options as of {first.name}")
            continue
        explained.append(preset)
        for option, default in preset.options.items():
            told = list(default) if isinstance(default, tuple) else default
            lines.append(f"{'':{WIDTH}}   {option}={told}: {preset.explain(option)}")
    return lines


def _shown(part: object) -> str:
    if not isinstance(part, dict):
        return str(part)
    return "{" + ", ".join(f"{key}: {value}" for key, value in part.items()) + "}"


class Format(StrEnum):
    llama = "llama"
    fla = "fla"


def convert(
    checkpoint: Annotated[str, typer.Argument(help="A folder or hub id.")],
    out: Annotated[Path, typer.Argument(help="A new folder.", metavar="OUT")],
    to: Annotated[
        Format,
        typer.Option(
            help="llama: a stock class of transformers (Llama, or Mistral, Qwen 2, Qwen 3 where "
            "attention has windows, biases, norms); fla: flash-linear-attention's transformer."
        ),
    ],
    revision: Annotated[str | None, typer.Option(help="Of a hub id.")] = None,
) -> None:
    """Write a checkpoint in the other format, weights bit for bit, tokenizer along.

    What the other format cannot say is refused by name (exit code 2), and nothing is written.
    """
    from qbench.checkpoints import find
    from qbench.checkpoints.convert import convert as write

    show_written(write(find(checkpoint, revision=revision), to.value, out))


def model_lines() -> list[str]:
    """Three lines a class: its name, whose attention and which scoring, what is quantized."""
    from qbench.checkpoints.supported import CLASSES

    lines = []
    for row in CLASSES.values():
        lines.append(f"{row.kind:18} {row.name}: {row.models}")
        lines.append(f"{'':18}   attention {row.attention}; scoring {_scoring(row)}")
        lines.append(f"{'':18}   quantized: {_weights(row)}")
    return lines


def model_table() -> str:
    """The table of docs/models.md."""
    from qbench.checkpoints.supported import CLASSES

    head = "| `model_type` | such as | attention | fastest scoring | quantized |\n"
    rule = "| --- | --- | --- | --- | --- |\n"
    rows = (
        f"| `{row.kind}` | {row.models} | {row.attention} | {_scoring(row)} | {_weights(row)} |\n"
        for row in CLASSES.values()
    )
    return head + rule + "".join(rows)


def _scoring(row: ModelClass) -> str:
    return f"{row.scoring} ({row.slower})" if row.slower else row.scoring


def _weights(row: ModelClass) -> str:
    spared = f"{row.spared} (say ignore: [{row.spared}])" if row.spared else ""
    not_quantized = ", ".join(filter(None, [row.left_out, spared]))
    return f"{row.weights}; not {not_quantized}" if not_quantized else row.weights


cache_app = typer.Typer(
    cls=WordedGroup, no_args_is_help=True, help="What runs keep for later ones: list it, bound it."
)


@cache_app.command("list")
def list_entries(
    results: Annotated[
        list[Path],
        typer.Option(metavar="FOLDER", help="Folders whose records say who uses what. Repeatable."),
    ] = [Path("results")],  # noqa: B006
) -> None:
    """What is kept, with sizes, ages and who uses it, the least recently used first."""
    from tabulate import tabulate

    from qbench.cache import entries, in_words
    from qbench.cell import cache_folder

    cache = cache_folder()
    found = entries(cache, results)
    rows = [
        (one.kind, one.about, in_words(one.bytes), one.age(), _users(one.used_by)) for one in found
    ]
    total = in_words(sum(one.bytes for one in found))
    if rows:
        head = ("kind", "what", "size", "unused for", "used by")
        typer.echo(tabulate(rows, headers=head, tablefmt="plain", disable_numparse=True))
    typer.echo(f"{cache}: {len(found)} entries, {total}")


@cache_app.command()
def prune(
    max_gib: Annotated[
        float, typer.Option(min=0, help="What may stay. The least recently used goes first.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go.")] = False,
) -> None:
    """Remove what nobody has used for longest, and what processes that died have left.

    What a run is at work on stays. What is gone is made again by the run that needs it.
    """
    from qbench.cache import GIB, in_words, prune
    from qbench.cell import cache_folder

    removed, leftovers = prune(cache_folder(), max_bytes=int(max_gib * GIB), dry_run=dry_run)
    word = "would remove" if dry_run else "removed"
    for one in removed:
        typer.echo(f"{word} {one.kind}: {one.about}, {in_words(one.bytes)}")
    for path in leftovers:
        typer.echo(f"{word} what a process that died had left: {path}")
    freed = in_words(sum(one.bytes for one in removed))
    typer.echo(f"{cache_folder()}: {word} {len(removed)} entries, {freed}")


def _users(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


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
for _command in (run.run, run.plan, run.noise, analyze.analyze):
    app.command(rich_help_panel="Run recipes")(_command)
for _command in (
    results.tables,
    pages.view,
    pages.report,
    results.show,
    results.export,
    results.check,
    results.baseline,
    results.compare,
    results.explain,
    results.published,
):
    app.command(rich_help_panel="Read results")(_command)
for _command in (train.tokenize, train.train):
    app.command(rich_help_panel="Train pairs")(_command)
app.command(rich_help_panel="Measure and look up")(convert)
app.add_typer(cache_app, name="cache", rich_help_panel="Measure and look up")
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
        typer.echo(model_table(), nl=False)
        return
    for line in _listing(Listing(what)):
        typer.echo(line)


def _listing(what: Listing) -> list[str]:
    if what is Listing.tasks:
        from qbench.evaluation.definitions import task_names

        return ["passkey", "passkey_TOKENS (qbench's own, without data)", *task_names()]
    if what is Listing.models:
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
