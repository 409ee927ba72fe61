"""The walk of a cell that docs/architecture.md tells is the one that a cell takes."""

import re
import sys
from pathlib import Path

import pytest
from small_recipe import small_recipe

import qbench
from qbench.evaluation.loaded import load_task
from qbench.plan import plan
from qbench.recipe import Recipe
from qbench.runner.grid import run_cells

PACKAGE = Path(qbench.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
ROW = re.compile(r"^\| (?:`([\w/]+\.py)` )?\| `([\w.]+)` \|", re.MULTILINE)


def told() -> list[tuple[str, str]]:
    """File and function of each row of the page's table."""
    section = PAGE.read_text().partition("## The walk of a cell")[2].partition("\n## ")[0]
    rows, file = [], ""
    for named, function in ROW.findall(section):
        file = named or file
        rows.append((file, function))
    return rows


@pytest.mark.usefixtures("own_cache")
def test_a_cell_takes_the_walk_that_the_page_tells(tmp_path):
    path = small_recipe(tmp_path, quantizers=["fp32", "hqq-4bit"], tasks=["demo_choice"])
    planned = plan(Recipe.load(path), device="cpu")
    base, cell = planned.select("softpick/*")
    run_cells(planned, out=tmp_path / "out", cells=[base])
    load_task.cache_clear()  # a worker's first cell
    entered = {}  # code objects, in the order in which they are first entered

    def profile(frame, event, _):
        if event == "call":
            entered.setdefault(frame.f_code)

    sys.setprofile(profile)
    try:
        (record,) = run_cells(planned, out=tmp_path / "out", cells=[cell])
    finally:
        sys.setprofile(None)
    assert record.status == "ok", record.error
    places = [(code.co_filename, code.co_qualname) for code in entered]
    walk = [(str(PACKAGE / file), function) for file, function in told()]
    assert len(walk) > 20
    assert [place for place in places if place in walk] == walk
