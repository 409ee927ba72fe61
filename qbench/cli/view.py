"""Show results in a browser (``qbench view``)."""

from __future__ import annotations

import os
import re
import threading
import webbrowser
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qbench.cli.app import show_written
from qbench.cli.options import NewFolder
from qbench.errors import DataError, RecipeError
from qbench.evaluation.tasks import plan_task
from qbench.files import cache_folder, require_folder
from qbench.machine import redirected
from qbench.store import Sources, Store, find_sources
from qbench.viewer.data import NO_TEXTS, Results, WholeStore
from qbench.viewer.server import Server, write_site

if TYPE_CHECKING:
    from qbench.records import Question, Record

ExistingFolder = Annotated[
    Path | None, typer.Option(exists=True, file_okay=False, metavar="FOLDER")
]
_MAKING = threading.Lock()
# of a task, as ``plan_task`` makes it: "arc_easy (5-shot) [validation, examples: train]"
LABEL = re.compile(r".*?( \((?P<shots>\d+)-shot\))?( \[(?P<files>[^\[\]]*)\])?")


def view(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...")],
    export: NewFolder = None,
    port: Annotated[int, typer.Option(min=0, max=65535)] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser")] = True,
    data: ExistingFolder = None,
    definitions: ExistingFolder = None,
) -> None:
    """Show results in a browser, from the answer down to one document's tokens.

    The server answers only this machine, and only at the address that it prints. Folders are
    watched: a run in progress fills in. Ctrl-C ends it.

    Examples:
    qbench view results/demo
    qbench view results/demo --export site

    Options:
    folders: Results folders that `qbench run` wrote.
    export: Write the same as a static site here, which needs no server and no network.
    port: Port of the local server. Default: any free one.
    browser: Open the page in a browser.
    data: The run's --data. Default: that of a run of this machine, or the hub's.
    definitions: Folder of task definitions, as given to the run. Default: the folder of the run on
        this machine, or lm-eval's tasks.
    """
    for folder in folders:
        Store(folder).manifest()  # without results it is refused before anything is served

    def results(store: Store) -> Results:
        remembered = find_sources(cache_folder(), store.manifest())
        sources = Sources(data or remembered.data, definitions or remembered.definitions)
        return Results(store, texts=partial(document_texts, sources))

    if export is not None:
        require_folder(export, "--export")
        paths = write_site([results(Store(folder)) for folder in folders], export)
        show_written(paths[:1])
        return
    shown = [results(WholeStore(folder)) for folder in folders]
    with Server(shown, port=port) as server:
        typer.echo(server.address)
        if browser:
            webbrowser.open(server.address)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def document_texts(sources: Sources, record: Record, task: str) -> dict[int, Question]:
    """Return the requests' texts of ``task`` as the record's cell scored them, by document index,
    from the data files that the record names. Nothing comes from the network: the hub is switched
    off for the whole process. Raises DataError if the data are missing or have changed."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    scores = [score for score in record.scores if score.task == task]
    label = LABEL.fullmatch(scores[0].label)
    stems = label["files"].split(", ") if label and label["files"] else []
    examples = [stem.removeprefix("examples: ") for stem in stems if stem.startswith("examples: ")]
    with _MAKING, redirected(Path(os.devnull)):  # lm-eval prints, and draws from global generators
        from qbench.evaluation.evaluate import rebuild_requests

        try:
            planned = plan_task(
                task,
                data=sources.data,
                definitions=sources.definitions,
                files=[stem for stem in stems if not stem.startswith("examples: ")] or None,
                fewshot_files=examples or None,
                num_fewshot=int(label["shots"]) if label and label["shots"] else None,
            )
        except RecipeError:  # a task that lm-eval does not have
            raise DataError(NO_TEXTS) from None
        documents = max(score.documents for score in scores)
        return rebuild_requests(record, [planned], documents, task).get(task, {})
