"""What commands share: options, help in words, and what is said on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args

import typer
from rich.console import Console
from typer.core import TyperGroup

from qbench.errors import (
    CheckpointProblems,
    DataProblems,
    OutputError,
    QbenchError,
    RecipeProblems,
    shown,
)
from qbench.files import require_folder, require_writable
from qbench.plugins import load_file


def to_file(help: str) -> Any:
    """An option that names a file to write: refused before work begins where that cannot be."""

    def check(param: typer.CallbackParam, value: Path | None) -> Path | None:
        if value is not None:
            require_writable(value, param.opts[0])
        return value

    return typer.Option(help=help, parser=_path, callback=check, metavar="FILE")


def to_folder(help: str) -> Any:
    """An option that names a folder to write into, which need not exist."""

    def check(param: typer.CallbackParam, value: Path | None) -> Path | None:
        if value is not None:
            require_folder(value, param.opts[0])
        return value

    return typer.Option(help=help, parser=_path, callback=check, metavar="FOLDER")


def _path(text: str) -> Path:
    if not text:
        raise OutputError("an empty path: name a file or folder to write, or leave the option out")
    return Path(text)


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class ScoringMode(StrEnum):
    auto = "auto"
    exact = "exact"
    fast = "fast"
    lm_eval = "lm-eval"


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"


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
        help="A recipe, such as recipes/gptq.yaml. Without one, --checkpoint, --quantizers and "
        "--tasks say what to run.",
    ),
]
_CHECKPOINT = "Use this folder or hub id for the recipe's checkpoint NAME. Repeatable."
CheckpointsOfRecipe = Annotated[
    list[str],
    typer.Option("--checkpoint", metavar="NAME=PATH_OR_HUB_ID", help=_CHECKPOINT),
]
Checkpoints = Annotated[
    list[str],
    typer.Option(
        "--checkpoint",
        metavar="NAME=PATH_OR_HUB_ID",
        help=f"{_CHECKPOINT} Without a recipe: the checkpoints, Δ is taken against the first.",
    ),
]
Quantizers = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="These quantizers, by commas: bf16,gptq-4bit. With +, weights and more: "
        "gptq-4bit+kv4. With a recipe, its labels keep their settings.",
    ),
]
Tasks = Annotated[
    str | None,
    typer.Option(metavar="NAMES", help="These tasks, by commas, instead of the recipe's."),
]
Definitions = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="lm-eval YAML files: tasks of your own."),
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="TASK/SPLIT.jsonl files: score from these, without the hub."
    ),
]
SkipMissing = Annotated[
    bool,
    typer.Option(
        "--skip-missing", help="Run the tasks that the data folder has; tables name the others."
    ),
]
Calibration = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="JSON Lines with a text field: what calibrated quantizers see."
    ),
]
CalibrationSamples = Annotated[
    int | None,
    typer.Option(
        min=1, help="Texts that calibrated quantizers see. Default: the recipe's, or 128."
    ),
]
CalibrationLength = Annotated[
    int | None,
    typer.Option(min=8, help="Tokens of each of them. Default: the recipe's, or 2048."),
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Score the first N documents of each task only.")
]
Only = Annotated[
    str | None,
    typer.Option(metavar="PATTERN", help="Only cells like this glob: 'softpick/gptq-*'."),
]
_RESULTS = "Results folder. Default: results/NAME of the recipe."
Out = Annotated[Path | None, to_folder(_RESULTS)]
OutToRead = Annotated[Path | None, typer.Option(help=_RESULTS, parser=_path, metavar="FOLDER")]


def _load_plugins(paths: list[Path]) -> list[Path]:
    """While options are read, so that a recipe can name what the files register."""
    for path in paths:
        load_file(path)
    return paths


PluginOption = Annotated[
    list[Path],
    typer.Option(
        parser=_path,
        callback=_load_plugins,
        is_eager=True,
        metavar="FILE",
        help="Python file that registers quantizers, normalizers or executors of your own; may be "
        "repeated.",
    ),
]
ExecutorOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Run cells on an executor that a plug-in registers."),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS|local[:N]",
        help="Run cells on a Dask cluster: the tcp:// address of its scheduler, a scheduler file, "
        "or local for worker processes of this host, N of them.",
    ),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        help="Compute in this dtype instead of the recipe's, unquantized cells too. Most CPUs are "
        "ten times slower in bfloat16.",
    ),
]
ScoringOption = Annotated[
    ScoringMode | None,
    typer.Option(
        metavar="MODE",
        help="Score in this mode instead of the recipe's: exact gives HFLM's scores, fast packs "
        "requests, lm-eval is HFLM itself; auto is the fastest that fits the model on a GPU, exact "
        "on a CPU.",
    ),
]
DeviceOption = Annotated[Device, typer.Option(help="Where to compute.")]
Run = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="ID",
        help="An earlier run into the same folder, as `qbench show FOLDER` lists them. Default: "
        "the last one.",
    ),
]
Published = Annotated[
    str | None,
    typer.Option(metavar="SET", help="Print a paper's numbers beside ours: softpick-340m."),
]
Json = Annotated[Path | None, to_file("Also write JSON here, and the table beside it.")]


WORDS = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}


class WordedGroup(TyperGroup):
    """Commands whose help names no types of Python, which newer versions of typer show."""

    def get_params(self, ctx: typer.Context) -> list[Any]:
        return _worded(super().get_params(ctx))

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _worded(command.get_params(ctx))
        return command


def _worded(params: Iterable[Any]) -> list[Any]:
    params = list(params)
    for param in params:
        if param.param_type_name == "option":
            if param.metavar is None:
                param.metavar = "" if getattr(param, "is_flag", False) else _word(param)
        elif hasattr(param, "display_type_rich"):  # an argument's name says what it is
            param.display_type_rich = lambda ctx: None
    return params


def _word(param: Any) -> str | None:
    """None leaves it to typer: choices, and whatever versions without such types show."""
    kind = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    return WORDS.get(next(iter(get_args(kind)), kind))


UNMAPPED = "failed to map segment"  # the loader's word for a library without room


def complain(line: str) -> None:
    """One line on standard error, in red where that can be shown.

    What is not printable, as a line break in a path, is escaped.
    """
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        console.print(text, style="bold red", markup=False)
    except MemoryError:  # what is complained of: plainly, then
        sys.stderr.write(f"{text}\n")


def refuse(error: Exception) -> NoReturn:
    """End with exit code 2 and what was wrong, one line a problem.

    Raises ``error`` again where it is an ImportError that is not for lack of memory.
    """
    if isinstance(error, ImportError) and UNMAPPED not in str(error):
        raise error
    with suppress(OSError):  # standard error may be on the full disk, too
        several = isinstance(error, RecipeProblems | CheckpointProblems | DataProblems)
        for line in error.lines if several else [_said(error)]:
            complain(line)
    sys.exit(2)


def _said(error: Exception) -> str:
    """One line on an error that is the machine's or the input's, not this program's."""
    if isinstance(error, QbenchError):
        return str(error)
    if isinstance(error, MemoryError | ImportError):
        return f"out of memory: {error}" if str(error) else "out of memory"
    if isinstance(error, UnicodeEncodeError):
        return f"text that {error.encoding} cannot hold: {shown(error.object[error.start :])}"
    if isinstance(error, UnicodeError):
        return f"not UTF-8 text ({error})"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def show_written(paths: list[Path]) -> None:
    """Which files a command wrote, on standard error so that output can be piped."""
    typer.echo("written: " + ", ".join(str(path) for path in paths), err=True)
