"""Numbers, names and reasons as text; foreign names have no effect in any format."""

import csv
import io
import re

import pytest
from synthetic import make_store

from qbench.comparison.compare import compare
from qbench.errors import shown
from qbench.runner.progress import Display
from qbench.tables import render
from qbench.text import as_csv, duration, for_csv, for_markdown, group_by_reason, number, table

HOSTILE = {
    "newline": "a\n\\input{/etc/passwd}", "carriage return": "a\r\\immediate\\write18{id}",
    "backslash": "\\end{longtable}\\newpage", "comment": "a%b{", "tag": "<script>alert(1)</script>",
    "columns": "a|b||c\\|d", "link": "[x](javascript:alert(1))",
    "formula": '=HYPERLINK("http://x","y")', "full width": "＝1+1", "tab": "\t=1",
    "right to left": "abc\u202eexe", "surrogate": "a\ud800b",
}  # fmt: skip
ALL = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)


def test_a_table_is_aligned_to_be_readable_unrendered():
    assert table(["name", "n"], [["a", 1], ["longer name", "−20.5"]], align="lr").splitlines() == [
        "| name        |     n |",
        "|:------------|------:|",
        "| a           |     1 |",
        "| longer name | −20.5 |",
    ]


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
    assert as_csv([{"x": number, "y": 1}]) == f"x,y\n{'' if number is None else number},1\n"


def test_lines_of_one_reason_become_one():
    found = [("a/x", "failed: no room"), ("b/x", "missing"), ("c/x", "failed: no room")]
    assert group_by_reason(found) == ["a/x, c/x: failed: no room", "b/x: missing"]


def test_many_names_are_counted():
    (line,) = group_by_reason((f"c{number}", "no") for number in range(32))
    assert line == "c0, c1, c2, c3, c4, c5, c6, c7 and 24 more: no"


def test_progress_says_a_failure_once():
    stream = io.StringIO()
    with Display(stream, 3) as display:
        for cell in ("a/x", "b/x", "c/x"):
            display.log(f"{cell}: FAILED: no room", "bold red")
    assert stream.getvalue().splitlines() == [
        "a/x: FAILED: no room", "b/x: FAILED, as a/x", "c/x: FAILED, as a/x"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"),
    [([1, "a", {"b": None}], "[1, 'a', {'b': None}]"), ("x" * 10**6, "'" + "x" * 78 + "…")],
    ids=["small", "long"],
)
def test_a_value_in_a_message_is_short(value, text):
    assert shown(value) == text


@pytest.mark.parametrize(
    ("value", "told"), [(3e227, "3e227"), (1e9, "1e9"), (123456.789, "123456.79"), (-0.001, "0.00")]
)
def test_a_perplexity_beyond_all_bounds_takes_one_cell(value, told):
    assert number(value, percent=False) == told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0, "1 s"), (17.2, "17 s"), (300, "5 min"), (11_520, "3.2 h"), (12 * 86_400, "12 days")],
)
def test_a_time_is_in_the_unit_that_a_person_would_say(seconds, told):
    assert duration(seconds) == told


@pytest.mark.parametrize("name", ["\\input{x}|<b>&_{}%", '=1+1"\\end{longtable}$^'])
def test_a_hostile_record_has_no_effect_on_any_format(name, tmp_path):
    """Every name of a foreign record says something to some format."""
    sizes = {"arc_easy": 20, "wikitext": 5}
    store, cells = make_store(tmp_path, sizes=sizes, quantizers=("bf16", "hqq-2bit")), []
    for cell in store.manifest().cells:
        record = store.get(cell)
        labels = [score.model_copy(update={"label": name}) for score in record.scores]
        update = {"title": name, "scores": tuple(labels)}
        if cell.cell == "softpick/hqq-2bit":
            update |= {"status": "failed", "error": f"{name}\n\\input{{y}}"}
        store.put(record.model_copy(update=update), store.outcomes(record), None)
        cells.append(cell.model_copy(update={"title": name}))
    store.put_manifest(store.manifest().model_copy(update={"cells": tuple(cells), "name": name}))
    comparison = compare(store)
    text = render(comparison, format="md")
    assert "<b>" not in text
    assert len([row for row in text.splitlines() if row.startswith("|")]) > 10
    cells = list(csv.reader(io.StringIO(render(comparison, format="csv"))))
    assert len({len(row) for row in cells}) == 1
    assert not any(cell.startswith("=") for row in cells for cell in row)
    tex = re.sub("(?m)^%.*", "", render(comparison, format="tex"))
    assert not re.search(r"\\input|\\end\{longtable", tex)
