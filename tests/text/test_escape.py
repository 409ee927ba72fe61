"""Foreign names in tables: in every format they are text, and numbers stay numbers."""

import csv
import io
import re

import pytest
from synthetic import make_store

from qbench.comparison.compare import compare
from qbench.tables import render
from qbench.text import for_csv, for_markdown, table

HOSTILE = {
    "newline": "a\n\\input{/etc/passwd}",
    "carriage return": "a\r\\immediate\\write18{id}",
    "backslash": "\\end{longtable}\\newpage",
    "comment": "a%b{",
    "tag": "<script>alert(1)</script>",
    "columns": "a|b||c\\|d",
    "link": "[x](javascript:alert(1))",
    "formula": '=HYPERLINK("http://x","y")',
    "full width": "＝1+1",
    "tab": "\t=1",
    "right to left": "abc\u202eexe",
    "surrogate": "a\ud800b",
}
ALL = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)


@ALL
def test_markdown_has_one_cell_no_tag_and_no_link(text):
    whole = table(["name", "n"], [[text, "1"], ["other", "2"]], align="lr")
    rows = whole.split("\n")
    assert len(rows) == 4
    assert all(row.isprintable() for row in rows)
    for row in rows:
        bare = re.sub(r"\\.", "", row)  # GitHub reads escaped characters first
        assert bare.count("|") == 3
        assert not re.search(r"[<`]|&(?!amp;|lt;)|\]\(", bare)
    assert for_markdown("−1.98, [+0.5, +1.0] ‡ × a_b") == "−1.98, [+0.5, +1.0] ‡ × a_b"


@ALL
def test_csv_has_no_formula_and_one_line(text):
    safe = for_csv(text)
    assert safe.isprintable()
    assert not re.match(r"\s*[=+\-@＝＋－＠]", safe)


@pytest.mark.parametrize("number", [-1, -1.5e-7, 0.0, float("inf"), None, True])
def test_numbers_stay_numbers_in_csv(number):
    assert for_csv(number) is number


@pytest.fixture(scope="module", params=["\\input{x}|<b>&_{}%", '=1+1"\\end{longtable}$^'])
def hostile(request, tmp_path_factory):
    """A grid of a foreign record: every name in it says something to some format."""
    folder = tmp_path_factory.mktemp("hostile")
    name = request.param
    store = make_store(
        folder, sizes={"arc_easy": 20, "wikitext": 5}, quantizers=("bf16", "hqq-2bit")
    )
    grid = store.manifest()
    cells = {}
    for cell in grid.cells:
        record = store.get(cell)
        labels = [score.model_copy(update={"label": name}) for score in record.scores]
        update = {"title": name, "scores": tuple(labels)}
        if cell.cell == "softpick/hqq-2bit":
            update |= {"status": "failed", "error": f"{name}\n\\input{{y}}"}
        store.put(record.model_copy(update=update), store.outcomes(record), None)
        cells[cell.cell] = cell.model_copy(update={"title": name})
    store.put_manifest(grid.model_copy(update={"cells": tuple(cells.values()), "name": name}))
    return compare(store), name


def test_a_hostile_record_has_no_effect_on_any_format(hostile):
    comparison, _ = hostile
    text = render(comparison, format="md")
    rows = [row for row in text.splitlines() if row.startswith("|")]
    assert "<b>" not in text
    assert len(rows) > 10
    cells = list(csv.reader(io.StringIO(render(comparison, format="csv"))))
    assert len({len(row) for row in cells}) == 1
    assert not any(cell.startswith("=") for row in cells for cell in row)
