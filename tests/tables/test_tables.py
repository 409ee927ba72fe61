"""Delta tables: laid out as the paper's, nothing left out, every number traceable."""

import csv
import io
import math
import re
import shutil
from pathlib import Path

import pytest
from synthetic import key, make_store

from qbench.comparison.compare import compare
from qbench.errors import RecipeError, ResultsError
from qbench.gate import baseline, check
from qbench.gate.verdict import as_markdown
from qbench.records import ActivationAudit, Part, Precision
from qbench.store import Store
from qbench.tables import COLUMNS, render, score_tables
from qbench.tables.scores import by_method

pytestmark = pytest.mark.usefixtures("few_rounds")
SMALL = {"arc_easy": 53, "lambada_openai": 71, "wikitext": 7}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return compare(
        make_store(
            tmp_path_factory.mktemp("plain") / "grid", sizes=SMALL,
            quantizers=("gptq-3bit", "bf16", "gptq-2bit", "hqq-2bit"),
            failed=("softpick/gptq-2bit",), missing=("softmax/hqq-2bit",),
        ),
        statistics=False,
    )  # fmt: skip


def test_there_is_one_table_a_method_with_the_unquantized_rows_in_the_papers_order(plain):
    result = by_method(plain)
    assert [part.name for part in result] == ["GPTQ", "HQQ"]
    for part in result:
        assert {row.title for row in part.rows} == {"Unquantized", part.name}
        assert part.rows[0].quantizer == "bf16"
    (table, *_) = score_tables(plain)
    assert [row[1] for row in table.rows[:4]] == ["Acc Norm ↑", "Acc ↑", "Acc Norm ↑", "Acc ↑"]
    assert [row[0] for row in table.shown if row[0]] == list(SMALL)


def test_the_page_has_failed_cells_differences_of_unrounded_values_and_redundant_metrics(plain):
    text, line = render(plain, format="md"), plain.lines[0]
    assert "failed" in next(row for row in text.splitlines() if "gptq-2bit" in row)
    assert "- softpick/gptq-2bit: failed: out of memory \\| while quantizing layer 3" in text
    softmax, softpick = (entry.value for entry in line.entries.values())
    assert line.delta("softpick") == softpick - softmax
    assert f"{(softpick - softmax) * 100:+.2f}".replace("-", "−") in text
    assert "Bits Per Byte" not in text
    assert "wikitext bits_per_byte" in text  # named below the table


def test_csv_has_every_score_of_the_grid_with_its_cell_key(plain):
    rows = list(csv.DictReader(io.StringIO(render(plain, format="csv"))))
    assert len(rows) == 4 * 2 * (2 + 2 + 3)
    assert all(row["key"] == key(row["checkpoint"], row["quantizer"]) for row in rows)
    assert {row["status"] for row in rows} == {"ok", "failed", "missing"}
    assert "bits_per_byte" in {row["metric"] for row in rows}
    exact = next(row for row in rows if row["status"] == "ok")
    assert float(exact["value"]) == plain.lines[0].entries["softmax"].value
    with pytest.raises(RecipeError, match=r"format 'docx': unknown; possible: md, tex, csv"):
        render(plain, format="docx")


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
    heads = [
        line
        for line in render(compare(store, statistics=False)).splitlines()
        if line.startswith("| Task")
    ]
    result = [[cell.strip() for cell in head.strip("|").split("|")][3:-1] for head in heads]
    assert result == columns


# With statistics


@pytest.fixture(scope="module")
def tested(tmp_path_factory):
    """A grid in which softpick is clearly better at hqq-2bit, and the rest is close."""
    store = make_store(
        tmp_path_factory.mktemp("tested"),
        sizes={"arc_easy": 400, "lambada_openai": 300, "wikitext": 30},
        quantizers=("bf16", "hqq-2bit", "hqq-8bit"),
        shift={"softmax/hqq-2bit": 1.0},
        failed=("softpick/hqq-8bit",),
    )
    return compare(store)


def test_a_clear_difference_is_marked_and_a_small_one_is_not(tested):
    text, tex = render(tested), render(tested, format="tex")
    assert tex.count("\\toprule") == text.count("### ")
    assert r"arc\_easy" in tex
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


def test_perplexities_have_no_interval_error_or_damage_on_the_raw_scale_in_the_csv(tested):
    rows = list(csv.DictReader(io.StringIO(render(tested, format="csv"))))
    asked = [row for row in rows if row["delta_p"] or row["damage_p"]]
    raw = [f"{question}{part}" for question in ("delta", "damage", "did")
           for part in ("_stderr", "_low", "_high")] + ["damage", "did"]  # fmt: skip
    perplexities = [row for row in asked if row["metric"].endswith("perplexity")]
    assert len(perplexities) > 10
    assert {row[column] for row in perplexities for column in raw} == {""}
    others = {row["did_log_ratio"] for row in asked if row not in perplexities}
    assert others == {""}
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


# Cells in parts: their precision in tables and report, and the damage of each part alone.


WEIGHTS = {"name": "gptq-4bit", "method": "gptq", "bits": 4}
INT8 = {"name": "int8-token", "bits": 8}
KV = {"name": "int4-token", "bits": 4}
PLAIN = {"name": "bf16", "method": "none"}
INT4_WEIGHTS = Part(bits=4, scheme="int4 in groups of 128")
INT8_INPUTS = Part(bits=8, scheme="int8 per token", simulated=True)
REAL_INPUTS = INT8_INPUTS.model_copy(update={"simulated": False})
INT4_CACHE = Part(bits=4, scheme="int4 per head and token")
CELLS = {  # label of the synthetic grid → settings, precision
    "gptq-4bit": (WEIGHTS, Precision(weights=INT4_WEIGHTS)),
    "hqq-2bit": ({"weights": PLAIN, "activations": INT8}, Precision(activations=INT8_INPUTS)),
    "hqq-3bit": (
        {"weights": WEIGHTS, "activations": INT8, "kv": KV},
        Precision(weights=INT4_WEIGHTS, activations=INT8_INPUTS, kv_cache=INT4_CACHE),
    ),
    "gptq-8bit": (
        {"weights": {**WEIGHTS, "bits": 8}, "activations": INT8},
        Precision(weights=Part(bits=8, scheme="int8 per row"), activations=REAL_INPUTS),
    ),
}
INPUTS = ActivationAudit(bits=8, levels=255, clipped=0.001, error=0.0123)


@pytest.fixture(scope="module")
def parts_store(tmp_path_factory):
    store = make_store(
        tmp_path_factory.mktemp("parts") / "parts",
        quantizers=("bf16", *CELLS),
        sizes={"arc_easy": 60, "wikitext": 12},
    )
    changed = []
    for cell in store.manifest().cells:
        settings, precision = CELLS.get(cell.quantizer, (PLAIN, Precision()))
        changed.append(cell.model_copy(update={"precision": precision}))
        record = store.get(cell)
        inputs = INPUTS if precision.activations else None
        update = {
            "precision": precision,
            "key_parts": {**record.key_parts, "quantizer": settings},
            "audit": record.audit.model_copy(update={"activations": inputs}),
        }
        store.put(record.model_copy(update=update), store.outcomes(record), None)
    store.put_manifest(store.manifest().model_copy(update={"cells": tuple(changed)}))
    return store


@pytest.fixture(scope="module")
def parts(parts_store):
    return compare(parts_store)


def test_tables_write_weights_activations_and_cache(parts):
    text = render(parts)
    assert "hqq-2bit (W16A8, simulated)" in text
    assert "hqq-3bit (W4A8KV4, simulated)" in text
    assert "gptq-8bit (W8A8, real)" in text
    assert "gptq-4bit (W4" not in text
    assert "W, A, KV: bits of weights, activations, KV cache" in text


def test_the_csv_has_each_part_in_a_column(parts):
    rows = {
        row["quantizer"]: row for row in csv.DictReader(io.StringIO(render(parts, format="csv")))
    }
    names = ("precision", "activations", "arithmetic", "kv_cache")
    shown = [rows["hqq-3bit"][name] for name in names]
    assert shown == ["W4A8KV4", "int8 per token", "simulated", "int4 per head and token"]
    assert rows["gptq-8bit"]["arithmetic"] == "real"
    assert rows["gptq-4bit"]["precision"] == "W4A16"
    assert rows["gptq-4bit"]["activations"] == ""


def test_the_gate_writes_the_precision_and_compares_what_was_measured(parts_store, tmp_path):
    baseline.make(parts_store, tmp_path / "baseline.tar.xz")
    same = check.check(parts_store, tmp_path / "baseline.tar.xz")
    assert same.outcome == "pass"
    assert "softpick/hqq-2bit (W16A8, simulated)" in as_markdown(same)
    shutil.copytree(parts_store.directory, tmp_path / "new")
    new = Store(tmp_path / "new")
    (cell,) = (cell for cell in new.manifest().cells if cell.cell == "softpick/hqq-2bit")
    record = new.get(cell)
    worse = record.audit.activations.model_copy(update={"error": 0.0123 * 1.06})
    real = record.precision.model_copy(update={"activations": REAL_INPUTS})
    audit = record.audit.model_copy(update={"activations": worse})
    changed = record.model_copy(update={"audit": audit, "precision": real})
    new.put(changed, new.outcomes(record), None)
    result = check.check(new, tmp_path / "baseline.tar.xz")
    assert [(g.cell, g.metric) for g in result.gates if g.outcome == "fail"] == [
        ("softpick/hqq-2bit", "activation_error")
    ]
