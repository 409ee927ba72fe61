"""Delta tables: laid out as the paper's, nothing left out, every number traceable."""

import csv
import io

import pytest
from synthetic import key, make_store

from qbench.comparison.compare import compare
from qbench.errors import RecipeError, ResultsError
from qbench.tables import render, score_tables
from qbench.tables.scores import by_method

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
    result = by_method(plain(store))
    assert [part.name for part in result] == ["GPTQ", "HQQ"]
    for part in result:
        assert {line.title for line in part.lines} == {"Unquantized", part.name}
        assert part.lines[0].quantizer == "bf16"


def test_rows_follow_the_papers_order_and_name_each_task_once(store):
    (table, *_) = score_tables(plain(store))
    assert [row[1] for row in table.rows[:4]] == ["Acc Norm ↑", "Acc ↑", "Acc Norm ↑", "Acc ↑"]
    assert [row[0] for row in table.shown if row[0]] == list(SMALL)


def test_a_failed_cell_is_shown_as_failed_with_its_reason_on_one_line(store):
    text = render(plain(store), format="md")
    line = next(line for line in text.splitlines() if "gptq-2bit" in line)
    assert "failed" in line
    assert "- softpick/gptq-2bit: failed: out of memory \\| while quantizing layer 3" in text


def test_delta_is_the_difference_of_the_unrounded_values(store):
    comparison = plain(store)
    line = comparison.lines[0]
    softmax, softpick = (entry.value for entry in line.entries)
    assert line.delta("softpick") == softpick - softmax
    assert f"{(softpick - softmax) * 100:+.2f}".replace("-", "−") in render(comparison)


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
        (("only",), [["only"]]),
        (("softmax", "softpick"), [["softmax", "softpick", "Δ"]]),
        (("a", "b", "c"), [["a", "b", "Δ"], ["a", "c", "Δ"]]),
    ],
)
def test_every_further_checkpoint_has_a_table_with_the_first(tmp_path, checkpoints, columns):
    store = make_store(
        tmp_path, sizes=SMALL, checkpoints=checkpoints, quantizers=("bf16", "hqq-2bit")
    )
    heads = [line for line in render(plain(store)).splitlines() if line.startswith("| Task")]
    result = [[cell.strip() for cell in head.strip("|").split("|")][3:-1] for head in heads]
    assert result == columns


def test_an_unknown_format_names_the_known_ones(store):
    with pytest.raises(RecipeError, match=r"--format docx: unknown; possible: md, tex, csv"):
        render(plain(store), format="docx")


# With statistics


def test_a_clear_difference_is_marked_and_a_small_one_is_not(tested):
    text = render(tested)
    assert "‡ |" in next(line for line in text.splitlines() if "hqq-2bit" in line)
    assert "‡" not in next(line for line in text.splitlines() if "bf16" in line)


def test_printed_scores_stand_beside_ours(tested):
    text = render(tested, published="softpick-340m")
    value = tested.lines[0].entries[0].value
    row = next(line for line in text.splitlines() if "56.61" in line)
    assert [cell.strip() for cell in row.strip("|").split("|")][2:6:3] == ["softmax/bf16", "56.61"]
    assert f" {100 * value:.2f} " in row
    with pytest.raises(RecipeError, match="--published nothing: unknown; possible: softpick-340m"):
        render(tested, published="nothing")


def test_latex_has_the_tables_with_special_characters_escaped(tested):
    tex = render(tested, format="tex")
    assert tex.count("\\toprule") == render(tested).count("### ")
    assert r"arc\_easy" in tex


@pytest.mark.parametrize("checkpoints", [("mine",), ("softmax", "softpick")])
def test_precisions_are_compared_with_the_one_that_is_named(tmp_path, checkpoints):
    store = make_store(
        tmp_path, sizes={"arc_easy": 60}, checkpoints=checkpoints,
        quantizers=("bf16", "bnb-4bit", "hqq-2bit"), shift={f"{checkpoints[0]}/hqq-2bit": 3.0},
    )  # fmt: skip
    comparison = compare(store, against="bnb-4bit")
    text = render(comparison).partition("### Against bnb-4bit")[2]
    assert "hqq-2bit" in text
    rows = {line.quantizer: line for line in comparison.lines if line.metric == "acc"}
    assert not rows["bnb-4bit"].against
    loss, values = rows["hqq-2bit"].against[checkpoints[0]], {
        name: row.entries[0].value for name, row in rows.items()
    }  # fmt: skip
    assert loss.estimate == pytest.approx(values["bnb-4bit"] - values["hqq-2bit"])
    assert loss.family == 2 * len(checkpoints)  # metrics
    with pytest.raises(ResultsError, match="--against nf4: not a quantized column; possible: b"):
        compare(store, against="nf4")
