"""Delta tables: laid out as the paper's, nothing left out, every number traceable."""

import csv
import io
import math
import re
from pathlib import Path

import pytest
from synthetic import key, make_store

from qbench.comparison.compare import compare
from qbench.errors import RecipeError, ResultsError
from qbench.tables import COLUMNS, render, score_tables
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
        assert {row.title for row in part.rows} == {"Unquantized", part.name}
        assert part.rows[0].quantizer == "bf16"


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
    softmax, softpick = (entry.value for entry in line.entries.values())
    assert line.delta("softpick") == softpick - softmax
    assert f"{(softpick - softmax) * 100:+.2f}".replace("-", "−") in render(comparison)


def test_csv_has_every_score_of_the_grid_with_its_cell_key(store):
    rows = list(csv.DictReader(io.StringIO(render(plain(store), format="csv"))))
    assert len(rows) == 4 * 2 * (2 + 2 + 3)
    assert all(row["key"] == key(row["checkpoint"], row["quantizer"]) for row in rows)
    assert {row["status"] for row in rows} == {"ok", "failed", "missing"}
    exact = next(row for row in rows if row["status"] == "ok")
    assert float(exact["value"]) == plain(store).lines[0].entries["softmax"].value


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
    with pytest.raises(RecipeError, match=r"format 'docx': unknown; possible: md, tex, csv"):
        render(plain(store), format="docx")


# With statistics


def test_a_clear_difference_is_marked_and_a_small_one_is_not(tested):
    text = render(tested)
    assert "‡ |" in next(line for line in text.splitlines() if "hqq-2bit" in line)
    assert "‡" not in next(line for line in text.splitlines() if "bf16" in line)


def test_printed_scores_stand_beside_ours(tested):
    text = render(tested, published="softpick-340m")
    value = tested.lines[0].entries["softmax"].value
    row = next(line for line in text.splitlines() if "56.61" in line)
    assert [cell.strip() for cell in row.strip("|").split("|")][2:6:3] == ["softmax/bf16", "56.61"]
    assert f" {100 * value:.2f} " in row
    with pytest.raises(RecipeError, match=r"nothing: unknown; possible: softpick-340m, .*d$"):
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
    assert not rows["bnb-4bit"].of("against")
    loss, values = rows["hqq-2bit"].of("against")[checkpoints[0]], {
        name: row.entries[checkpoints[0]].value for name, row in rows.items()
    }  # fmt: skip
    assert loss.estimate == pytest.approx(values["bnb-4bit"] - values["hqq-2bit"])
    assert loss.family == 2 * len(checkpoints)  # metrics
    with pytest.raises(ResultsError, match="--against nf4: not a quantized column; possible: b"):
        compare(store, against="nf4")


# Every column of tables.csv is explained in one table of the docs.


PAGE = Path(__file__).parents[2] / "docs" / "tables.md"


def test_every_column_is_in_the_table_of_the_docs():
    table = PAGE.read_text().split("## tables.csv")[1]
    names = set(re.findall(r"`([a-z0-9_…]+)`", table))
    contrasts = [name.removesuffix("…") for name in names if re.fullmatch(r"[a-z]+…", name)]
    endings = [name.removeprefix("…") for name in names if name.startswith("…")]
    shown = {contrast + ending for contrast in contrasts for ending in ["", *endings]}
    assert set(COLUMNS) - names - shown == set()


# Perplexities are compared by their ratio, and damage stands below each delta table.


def of_perplexities(row):
    return row["metric"].endswith("perplexity")


def test_perplexities_have_no_interval_error_or_damage_on_the_raw_scale_in_the_csv(tested):
    rows = list(csv.DictReader(io.StringIO(render(tested, format="csv"))))
    asked = [row for row in rows if row["delta_p"] or row["damage_p"]]
    raw = [f"{question}{part}" for question in ("delta", "damage", "did")
           for part in ("_stderr", "_low", "_high")] + ["damage", "did"]  # fmt: skip
    perplexities = [row for row in asked if of_perplexities(row)]
    assert len(perplexities) > 10
    assert {row[column] for row in perplexities for column in raw} == {""}
    others = [row for row in asked if not of_perplexities(row)]
    assert {row["did_log_ratio"] for row in others} == {""}
    for row in perplexities:
        if row["delta"]:
            ends = [float(row[f"delta_log_ratio{end}"]) for end in ("_low", "", "_high")]
            assert ends == sorted(ends)
            base = next(
                r for r in rows if r["checkpoint"] == "softmax"
                and all(r[name] == row[name] for name in ("task", "metric", "quantizer"))
            )  # fmt: skip
            assert float(row["delta"]) == float(row["value"]) - float(base["value"])
            ratio = float(row["value"]) / float(base["value"])
            assert ends[1] == pytest.approx(math.log(ratio), abs=1e-9)


def test_damage_and_its_difference_stand_below_each_delta_table_as_ratios(tested):
    text = render(tested)
    assert "Records: ." not in text
    assert "softpick’s − softmax’s" in text
    lines = [line for line in tested.lines if line.of("damages")]
    line = next(line for line in lines if line.metric == "word_perplexity")
    shown = [float(number) for number in re.findall(r"\d+\.\d+", text)]
    for effect in (*line.of("damages").values(), *line.of("differences").values()):
        for value in (effect.estimate, effect.low, effect.high):
            assert any(number == pytest.approx(math.exp(value), abs=6e-4) for number in shown)
    assert "× [" in text
    accuracy = next(line for line in tested.lines if line.of("differences") and line.percent)
    told = f"{100 * accuracy.of('differences')['softpick'].estimate:+.2f}".replace("-", "−")
    assert told in text
