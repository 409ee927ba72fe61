"""Delta tables: laid out as the paper's, nothing left out, every number traceable."""

from __future__ import annotations

import csv
import io

import pytest
from synthetic import PAPER, key, make_store

from qbench.compare import compare
from qbench.errors import RecipeError, ResultsError
from qbench.store import Store
from qbench.tables import delta, render

SMALL = {"arc_easy": 53, "lambada_openai": 71, "wikitext": 7}


@pytest.fixture
def store(tmp_path):
    return make_store(
        tmp_path / "grid",
        sizes=SMALL,
        quantizers=("gptq-3bit", "bf16", "gptq-2bit", "hqq-2bit"),
        failed=("softpick/gptq-2bit",),
        missing=("softmax/hqq-2bit",),
    )


def plain(store):
    return compare(store, statistics=False)


def test_there_is_one_table_a_method_each_with_the_unquantized_rows(store):
    tables = delta(plain(store))
    assert [table.method for table in tables] == ["gptq", "hqq"]
    for table in tables:
        assert {row.line.method for row in table.rows} == {"none", table.method}
        assert table.rows[0].line.quantizer == "bf16"


def test_rows_follow_the_papers_order_and_name_each_task_once(store):
    rows = delta(plain(store))[0].rows
    assert [row.line.metric for row in rows[:4]] == ["acc_norm", "acc", "acc_norm", "acc"]
    assert [row.line.task for row in rows if row.begins_task] == list(SMALL)


def test_a_failed_cell_is_shown_as_failed_with_its_reason_on_one_line(store):
    text = render(plain(store), format="md")
    line = next(line for line in text.splitlines() if "gptq-2bit" in line)
    assert "failed" in line
    assert "- softpick/gptq-2bit: failed: out of memory \\| while quantizing layer 3" in text


def test_a_missing_cell_is_shown_as_missing(store):
    text = render(plain(store), format="md")
    line = next(line for line in text.splitlines() if "hqq-2bit" in line)
    assert "— missing" in line


def test_delta_is_the_difference_of_the_unrounded_values(store):
    comparison = plain(store)
    line = comparison.lines[0]
    softmax, softpick = (entry.value for entry in line.entries)
    assert line.delta("softpick") == softpick - softmax
    assert f"{(softpick - softmax) * 100:+.2f}".replace("-", "−") in render(comparison)


def test_every_markdown_row_has_as_many_cells_as_the_head(store):
    for block in render(plain(store)).split("### ")[1:]:
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({row.count(" | ") for row in rows}) == 1


def test_csv_has_every_score_of_the_grid_with_its_cell_key(store):
    rows = list(csv.DictReader(io.StringIO(render(plain(store), format="csv"))))
    assert len(rows) == 4 * 2 * (2 + 2 + 3)
    assert all(row["key"] == key(row["checkpoint"], row["quantizer"]) for row in rows)
    assert {row["status"] for row in rows} == {"ok", "failed", "missing"}
    exact = next(row for row in rows if row["status"] == "ok")
    assert float(exact["value"]) == plain(store).lines[0].entries[0].value


def test_redundant_metrics_are_in_the_csv_and_named_below_the_table(store):
    comparison = plain(store)
    assert "bits_per_byte" in render(comparison, format="csv")
    assert "Bits Per Byte" not in render(comparison)
    assert "wikitext bits_per_byte" in render(comparison)


@pytest.mark.parametrize(
    ("checkpoints", "columns"),
    [
        (("only",), ["only"]),
        (("softmax", "softpick"), ["softmax", "softpick", "Δ"]),
        (("a", "b", "c"), ["a", "b", "c", "Δ b", "Δ c"]),
    ],
)
def test_there_is_one_delta_column_for_each_further_checkpoint(tmp_path, checkpoints, columns):
    store = make_store(
        tmp_path, sizes=SMALL, checkpoints=checkpoints, quantizers=("bf16", "hqq-2bit")
    )
    head = next(line for line in render(plain(store)).splitlines() if line.startswith("| Task"))
    assert [cell.strip() for cell in head.strip("|").split("|")][3:-1] == columns


def test_a_grid_that_quantizes_nothing_still_has_a_table(tmp_path):
    store = make_store(tmp_path, sizes=SMALL, quantizers=("bf16",))
    assert [table.method for table in delta(plain(store))] == ["none"]


def test_a_grid_in_which_every_cell_failed_still_shows_its_tasks(tmp_path):
    cells = [f"{c}/{q}" for c in ("softmax", "softpick") for q in PAPER]
    text = render(plain(make_store(tmp_path, sizes=SMALL, failed=cells)))
    assert all(task in text for task in SMALL)
    assert text.count("failed") > len(cells)


def test_an_unknown_format_names_the_known_ones(store):
    with pytest.raises(RecipeError, match=r"--format docx: unknown; possible: md, csv"):
        render(plain(store), format="docx")


def test_a_folder_without_results_says_what_to_name(tmp_path):
    with pytest.raises(ResultsError, match=r"no grid\.json here"):
        compare(Store(tmp_path))
