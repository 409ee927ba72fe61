"""Commands that show results in a browser: view, report."""

from __future__ import annotations

import os
import threading
import webbrowser
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qbench.cli.messages import show_written
from qbench.cli.options import Folder, Run, folder_option, open_store
from qbench.cli.show import asked_texts
from qbench.errors import DataError, OutputError, RecipeError
from qbench.files import require_folder
from qbench.recipe import Overrides, Recipe
from qbench.store import Store
from qbench.viewer.data import NO_TEXTS, Results, WholeStore
from qbench.viewer.export import write_report, write_site
from qbench.viewer.server import Server

if TYPE_CHECKING:
    from qbench.records import Question, Record

_MAKING = threading.Lock()


def view(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Results folders that `qbench run` wrote."),
    ],
    export: Annotated[
        Path | None,
        folder_option(
            "Write the same as a static site here, which needs no server and no network."
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the local server. Default: any free one.")
    ] = 0,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")
    ] = True,
    recipe: Annotated[
        Path | None,
        typer.Option(help="The recipe of the run: shows the documents' texts."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="The run's --data. Without it and --recipe: the hub's cache."),
    ] = None,
    run: Run = None,
) -> None:
    """Show results in a browser, from the answer down to one document's tokens.

    The server answers this machine alone, and only at the address that it prints. Folders are
    watched: a run in progress fills in. Ctrl-C ends it.

    Examples:
    ```
    qbench view results/demo
    qbench view results/demo --export site
    ```
    """
    for folder in folders:
        Store(folder, run=run).manifest()  # without results it is refused before anything is served
    if recipe is not None:
        Recipe.load(recipe, Overrides(data=data))
    elif data is not None and not data.is_dir():
        raise DataError(f"--data {data}: no such folder")
    texts = partial(_texts, recipe, data)
    if export is not None:
        require_folder(export, "--export")
        paths = write_site(
            [Results(Store(folder, run=run), texts=texts) for folder in folders], export
        )
        show_written(paths[:1])
        return
    results = [Results(WholeStore(folder, run=run), texts=texts) for folder in folders]
    with Server(results, port=port) as server:
        typer.echo(server.address)
        if browser:
            webbrowser.open(server.address)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def _texts(
    recipe: Path | None, data: Path | None, record: Record, task: str
) -> dict[int, Question]:
    """What the record's cell was asked of a task, by document; nothing comes from the network.
    Raises DataError, with ``recipe`` also RecipeError, where it is not to be had."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    documents = max(score.documents for score in record.scores if score.task == task)
    with _MAKING:  # lm-eval draws from the process's generators
        try:
            return asked_texts(record, recipe, data, documents, task).get(task, {})
        except RecipeError:
            if recipe is not None:
                raise
            raise DataError(NO_TEXTS) from None  # a task that lm-eval has not


def report(
    folder: Folder,
    out: Annotated[
        Path | None,
        folder_option(
            "Where to write it. Default: FOLDER, or FOLDER/runs/ID with --run; here where "
            "FOLDER is read-only."
        ),
    ] = None,
    run: Run = None,
) -> None:
    """Write report.html: the first page of `qbench view` in one file that needs no network.

    Examples:
    ```
    qbench report results/demo
    ```
    """
    store = open_store(folder, run)
    try:
        require_folder(out or folder, "--out" if out else "")
    except OutputError as error:
        if out:
            raise
        typer.echo(f"not written beside the results: {error}", err=True)
        out = Path()
    path = out / "report.html" if out else store.output("report.html")
    show_written([write_report(Results(store), path)])
