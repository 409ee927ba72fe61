"""Why models suffer: the report's part on it, and the files of the folder `analysis`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from qbench.analyses import Analyses
from qbench.errors import ResultsError
from qbench.report import analysis_figures
from qbench.report.figures import Drawn, Plate, drawn, plates
from qbench.report.tables import Cell, DataTable, build
from qbench.store import Store, write_atomically
from qbench.tables import analyses
from qbench.tables.analyses import Section, Why, all_sections, gather, markdown, pruned_rows, texts
from qbench.tables.analyses_csv import CSV_FILES, as_csv, comma_separated, sensitivity_rows

SECTION = "why"


def write_analyses(store: Store) -> list[Path]:
    """Write ``tables.md``, the CSV files and the figures into the folder of the analyses; returns
    the paths, Markdown first. Raises ResultsError where a file is damaged."""
    why = gather(store)
    folder = Analyses(store.directory).folder
    keys = analysis_figures.passkey_rows(store, why.records)
    contents = {"tables.md": markdown(why)}
    contents |= {name: comma_separated(name, why.cells) for name in CSV_FILES}
    if why.long:
        contents["stretches.csv"] = comma_separated("stretches.csv", why.long)
    contents["sensitivity.csv"] = as_csv(list(sensitivity_rows(why.sensitivities)))
    contents |= _of_records(why, keys)
    paths = []
    for name, text in contents.items():
        if text:
            paths.append(folder / name)
            write_atomically(paths[-1], text.encode())
        else:  # of an earlier analysis, which had rows
            (folder / name).unlink(missing_ok=True)
    pictures = plates(drawings(why, keys), folder / "figures", ("svg",))
    return [*paths, *(path for one in pictures for path in one.paths)]


def write_numbers(store: Store, why: Why, folder: Path) -> list[Path]:
    """The numbers behind figures that need no analysis, as CSV, where there are any."""
    found = _of_records(why, analysis_figures.passkey_rows(store, why.records))
    paths = []
    for name, text in found.items():
        if text:
            paths.append(folder / name)
            write_atomically(paths[-1], text.encode())
    return paths


def _of_records(why: Why, keys: Sequence[analysis_figures.Row]) -> dict[str, str]:
    return {"passkey.csv": as_csv(keys), "pruned.csv": as_csv(pruned_rows(why.records))}


def why_tables(why: Why) -> list[DataTable]:
    """Those of the page; without analyses those of passkey retrieval and of pruned heads."""
    found = all_sections(why) if why.there else analyses.of_records(why.records)
    return [_table(section) for section in found]


def why_plates(store: Store, why: Why, folder: Path, formats: Sequence[str]) -> list[Plate]:
    """Those of the page. Raises ResultsError where a table of outcomes is damaged."""
    return plates(drawings(why, analysis_figures.passkey_rows(store, why.records)), folder, formats)


def read(store: Store) -> tuple[Why | None, list[str]]:
    """All that there is, and what was read and what is missing; or why a part cannot be read."""
    try:
        why = gather(store)
    except ResultsError as error:
        return None, [str(error)]
    if not why.there:
        return why, []
    return why, [*dict.fromkeys([*texts(why.cells), *texts(why.long)]), *why.problems]


def drawings(
    why: Why, keys: Sequence[analysis_figures.Row] = ()
) -> list[Callable[[], list[Drawn]]]:
    makers = [
        *analysis_figures.figures(why.cells, why.replicates),
        *analysis_figures.figures_along_figures(why, keys),
    ]
    return [lambda make=make: drawn(SECTION, make) for make in makers]


def _table(section: Section) -> DataTable:
    """Every text that is a number is sorted as one."""
    rows = [[Cell(text=text, sort=_number(text)) for text in row] for row in section.rows]
    return build(
        f"why-{section.name}", SECTION, section.title, section.note, section.head, rows,
        keys=section.keys,
    )  # fmt: skip


def _number(text: str) -> float | None:
    first = text.replace("−", "-").replace("∞", "inf").removesuffix(" (chance)").removesuffix(" %")
    try:
        return float(first)
    except ValueError:
        return None
