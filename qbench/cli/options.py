"""Options that commands share, in words."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from qbench.errors import OutputError
from qbench.files import require_writable
from qbench.plugins import load_file
from qbench.store import Store, run_id, runs


def to_file(help: str) -> Any:
    """An option that names a file to write: refused before work begins where that cannot be."""

    def check(param: typer.CallbackParam, value: Path | None) -> Path | None:
        if value is not None:
            require_writable(value, param.opts[0])
        return value

    return typer.Option(help=help, parser=_path, callback=check, metavar="FILE")


def folder_option(help: str) -> Any:
    """An option that names a folder; who writes into it sees first whether that can be."""
    return typer.Option(help=help, parser=_path, metavar="FOLDER")


def _path(text: str) -> Path:
    if not text:
        raise OutputError("an empty path: name a file or folder to write, or leave the option out")
    return Path(text)


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


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
    typer.Option(metavar="PATTERN", help="Only cells that match this glob: 'softpick/gptq-*'."),
]
Out = Annotated[Path | None, folder_option("Results folder. Default: results/NAME of the recipe.")]


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
Against = Annotated[
    str | None,
    typer.Option(
        metavar="QUANTIZER",
        help="With one checkpoint: compare each other precision with this one. Default: each "
        "pair, if they are few.",
    ),
]
Published = Annotated[
    str | None,
    typer.Option(metavar="SET", help="Print a paper's numbers beside ours: softpick-340m."),
]
Json = Annotated[Path | None, to_file("Also write JSON here, and the table beside it.")]


def open_store(folder: Path, run: str | None, option: str = "--run") -> Store:
    """The results of a ``run``, or of the last one; where a folder holds several, standard error
    is told which that is."""
    store = Store(folder, run=run)
    known = [name for name, _ in runs(folder)]
    if store.run is None and len(known) > 1:
        last = run_id(store.grid())
        others = ", ".join(name for name in known if name != last)
        typer.echo(
            f"{folder} holds {len(known)} runs; this is the last one, {last}; {option} shows "
            f"another: {others}",
            err=True,
        )
    return store
