"""``qbench analyze`` on the bundled pair: records, reuse, tables, refusals."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from analysis.conftest import SHORT
from small_recipe import DEMO, qbench, small_recipe

from qbench.errors import DataError, RecipeError, ResultsError
from qbench.store import Analyses, Store
from qbench.tables.analyses import analyses_csv, load_analyses, markdown, table_4, texts_read

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def copied(analyzed, tmp_path):
    """A copy of it that may be changed."""
    return analyzed[0], shutil.copytree(analyzed[1], tmp_path / "out")


PAGES = DEMO / "data" / "demo_pages"


@pytest.mark.parametrize(
    ("options", "source"),
    [((), "task demo_pages"),
     (("--text", PAGES / "test.jsonl", "--field", "page"), "test.jsonl, field page")],
)  # fmt: skip
def test_only_the_text_that_is_read_needs_its_data(undrawn, tmp_path, options, source):
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    if not options:
        shutil.copytree(PAGES, data / "demo_pages")
    given = ("--data", data, "--out", out, *options)
    assert qbench("analyze", small_recipe(tmp_path), *given, *SHORT) == 0
    assert {(r.status, r.text.source) for r in Analyses(out).records()} == {("ok", source)}


def test_a_text_without_its_data_is_named(tmp_path):
    data = tmp_path / "data"
    shutil.copytree(DEMO / "data" / "demo_choice", data / "demo_choice")
    recipe = small_recipe(tmp_path, tasks=["demo_choice", "demo_pages"])
    with pytest.raises(RecipeError, match=r"whole texts .*\(demo_pages: no data\)"):
        qbench("analyze", recipe, "--data", data, "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (("--field", "page"), RecipeError, "--field: needs --text"),
        (("--only", "nothing/*"), RecipeError, "matches no cell"),
        (("--text", "nowhere.jsonl"), RecipeError, "--text nowhere.jsonl: no such file"),
        (("--text", PAGES / "test.jsonl"), DataError, ":1: no text in field"),
        (("--sensitivity", "none"), RecipeError, "--sensitivity 'none': .*; it has fp32, rtn-4bit"),
        (("--sensitivity", "fp32"), RecipeError, "quantizes neither weights nor activations"),
        (("--blocks",), RecipeError, "--blocks: needs --sensitivity"),
    ],
)
def test_what_cannot_work_is_refused_and_leaves_what_was_meant_before(
    analyzed, options, error, words
):
    recipe, out = analyzed
    before = Analyses(out).manifest_before()
    with pytest.raises(error, match=words):
        qbench("analyze", recipe, "--out", out, "--device", "cpu", "--length", 16, *options)
    assert Analyses(out).manifest_before() == before


def finished(out):
    return {record.cell: record.finished for record in Analyses(out).records()}


def test_the_unquantized_cells_are_analyzed_and_written_as_tables(analyzed):
    _, out = analyzed
    result = Analyses(out).records()
    assert [record.cell for record in result] == ["softmax/fp32", "softpick/fp32"]
    for record in result:
        assert record.status == "ok"
        assert record.text.samples == 2
        assert record.text.length == 32
        assert record.key_parts["analysis"]["length"] == 32
        assert {stage.name for stage in record.stages} == {"load", "analyze"}
    assert result[0].measured.zeros == 0 < result[1].measured.zeros
    assert result[0].text.tokens == result[1].text.tokens  # one tokenizer, one text
    text = (out / "analysis" / "tables.md").read_text()
    assert "2 texts of 32 tokens (BOS counted) of task demo_pages" in text
    assert "| softpick/fp32 |" in text
    assert "KL" not in text  # no cell of the same weights was scored
    figures = {path.name for path in (out / "analysis" / "figures").iterdir()}
    assert figures == {"boxes.svg", "sinks.svg"}


def test_a_second_analysis_computes_nothing_unless_forced_or_damaged(copied, undrawn, capfd):
    path, out = copied
    before = finished(out)
    assert qbench("analyze", path, "--out", out, *SHORT) == 0
    assert finished(out) == before
    assert qbench("analyze", path, "--out", out, *SHORT, "--only", "softpick/fp32", "--force") == 0
    forced = finished(out)
    assert forced["softmax/fp32"] == before["softmax/fp32"]
    assert forced["softpick/fp32"] > before["softpick/fp32"]
    (record,) = (out / "analysis" / "softmax" / "fp32").glob("*.json")
    content = json.loads(record.read_text())
    content["measured"]["zeros"] = 0.5
    record.write_text(json.dumps(content))
    assert qbench("analyze", path, "--out", out, *SHORT) == 0
    assert "made again" in capfd.readouterr().err
    after = finished(out)
    assert after["softmax/fp32"] > before["softmax/fp32"]
    assert after["softpick/fp32"] == forced["softpick/fp32"]


def test_another_text_or_length_is_another_key_and_the_old_analysis_stays(
    copied, undrawn, tmp_path, capfd
):
    path, out = copied
    keys = {record.cell: record.key for record in Analyses(out).records()}
    text = tmp_path / "own.jsonl"
    pages = (DEMO / "data" / "demo_pages" / "test.jsonl").read_text().splitlines()[:3]
    text.write_text("\n".join([json.dumps({"page": "short"}), *pages]))
    options = ("--text", text, "--field", "page", "--only", "softmax/fp32")
    assert qbench("analyze", path, "--out", out, *SHORT, *options) == 0
    assert "held analyses of other" in capfd.readouterr().err
    (record,) = Analyses(out).records()
    assert record.key != keys["softmax/fp32"]
    assert (record.text.source, record.text.left_out) == ("own.jsonl, field page", 1)
    assert "; 1 shorter one left out; " in texts_read([record])[0]
    assert qbench("analyze", path, "--out", out, *SHORT, *options, "--no-bos") == 0
    (bare,) = Analyses(out).records()
    assert bare.key != record.key
    assert not bare.text.bos
    assert len(list((out / "analysis" / "softmax" / "fp32").glob("*.json"))) == 3


def test_a_quantized_cell_is_quantized_audited_and_stands_beside_its_damage(copied):
    path, out = copied
    assert qbench("run", path, "--out", out, "--device", "cpu", "--only", "softmax/*") == 0
    only = ("--only", "softmax/rtn-4bit")
    assert qbench("analyze", path, "--out", out, *SHORT, *only) == 0
    result = {record.cell: record for record in Analyses(out).records()}
    quantized, whole = result["softmax/rtn-4bit"], result["softmax/fp32"]
    assert {stage.name for stage in quantized.stages} == {"load", "quantize", "audit", "analyze"}
    assert [i.name for i in quantized.measured.inputs] == [i.name for i in whole.measured.inputs]
    assert quantized.measured.hidden.kurtosis != whole.measured.hidden.kurtosis
    text = (out / "analysis" / "tables.md").read_text()
    assert "softmax/rtn-4bit" in text
    row = next(line for line in text.splitlines() if line.startswith("| softmax/fp32"))
    assert float(row.split("|")[-2]) > 0
    softpick = next(line for line in text.splitlines() if line.startswith("| softpick/fp32"))
    assert softpick.split("|")[-2].strip() == "—"
    assert qbench("view", out, "--export", out / "site") == 0
    assert '"sink' in (out / "site" / "data" / "0" / "analysis.js").read_text()
    (record,) = (out / "analysis" / "softpick" / "fp32").glob("*.json")
    record.write_text(record.read_text().replace('"zeros"', '"zeroes"', 1))
    with pytest.raises(ResultsError, match="damaged"):
        qbench("view", out, "--export", out / "site")


def test_texts_may_be_longer_than_the_context(copied, tmp_path):
    path, _ = copied
    options = ("--only", "softpick/fp32", "--length", 300, "--samples", 2)
    assert qbench("analyze", path, "--out", tmp_path, *options) == 0
    (longer,) = Analyses(tmp_path).records()
    assert longer.text.length == 300 > 256  # the context of the demo's models
    rows = csv.DictReader((tmp_path / "analysis" / "analyses.csv").read_text().splitlines())
    values = {row["measure"]: row["value"] for row in rows}
    assert float(values["stretches.2.loss"]) == longer.measured.stretches[2].loss


def test_a_cell_that_fails_has_a_record_a_line_and_exit_code_1(copied, undrawn, monkeypatch, capfd):
    (path, out), only = copied, ("--only", "softmax/fp32")
    shutil.rmtree(out / "analysis" / "softmax")
    with monkeypatch.context() as broken:
        broken.setattr("qbench.analysis.measure._losses", lambda *_: 1 / 0)
        assert qbench("analyze", path, "--out", out, *SHORT, *only) == 1
    assert "softmax/fp32: failed: ZeroDivisionError" in capfd.readouterr().err
    failed = Analyses(out).records()[0]
    assert (failed.status, failed.measured) == ("failed", None)
    assert "softmax/fp32: failed" in markdown(load_analyses(Store(out)))
    assert qbench("analyze", path, "--out", out, *SHORT) == 0  # tried again
    good = Analyses(out).records()
    assert good[0].status == "ok"
    monkeypatch.setattr("qbench.analysis.measure._losses", lambda *_: 1 / 0)
    assert qbench("analyze", path, "--out", out, *SHORT, *only, "--force") == 1
    assert Analyses(out).records() == good  # not replaced


def test_texts_that_are_too_short_are_named(copied, undrawn, capfd):
    path, out = copied
    only = ("--only", "softmax/fp32", "--length", 400)
    assert qbench("analyze", path, "--out", out, *SHORT, *only) == 1
    assert "its longest text has 320 tokens, 399 are needed; lower --length" in (
        capfd.readouterr().err
    )


def test_a_recipe_without_whole_texts_or_unquantized_cells_says_what_to_name(tmp_path):
    with pytest.raises(RecipeError, match="--text"):
        qbench("analyze", small_recipe(tmp_path, tasks=["demo_choice"]), "--out", tmp_path / "out")
    bits = [{"name": "rtn-4bit", "group_size": 64}]
    with pytest.raises(RecipeError, match="--only"):
        qbench("analyze", small_recipe(tmp_path, quantizers=bits), "--out", tmp_path / "out")


# What analyses say as tables and files: table 4, over seeds, one CSV, the paper's rows.


PAIR = Path(__file__).parents[2] / "results" / "pair-27m"
CHECKPOINTS = ("softmax.1", "softmax.2", "softpick.1", "softpick.2")
GROUPS = {"softmax": CHECKPOINTS[:2], "softpick": CHECKPOINTS[2:]}


@pytest.fixture(scope="module")
def results():
    return load_analyses(Store(PAIR))


@pytest.fixture(scope="module")
def seeds(results):
    """The pair twice, as two trainings of each kind; the second with twice the kurtosis."""

    def twice(analyses, second=lambda record: record):
        return tuple(
            made.model_copy(update={"checkpoint": f"{record.checkpoint}.{number}"})
            for record in analyses
            for number, made in ((1, record), (2, second(record)))
        )

    def doubled(record):
        hidden = record.measured.hidden
        hidden = hidden.model_copy(update={"kurtosis": 2 * hidden.kurtosis})
        return record.model_copy(update={"measured": record.measured.model_copy(
            update={"hidden": hidden})})  # fmt: skip

    return replace(
        results, cells=twice(results.cells, doubled), records=twice(results.records),
        replicates=GROUPS,
    )  # fmt: skip


def test_table_4_and_the_damage_are_means_over_seeds(seeds):
    (table,) = table_4(seeds)
    names = [row[0] for row in table.rows]
    assert names[:2] == [f"{group}/bf16, 2 trainings" for group in GROUPS]
    assert {*names[2:]} == {f"{checkpoint}/bf16" for checkpoint in CHECKPOINTS}
    kurtosis = seeds.cells[0].measured.hidden.kurtosis
    row = dict(zip(table.head, table.rows[0], strict=True))
    assert row["Kurtosis"] == f"{1.5 * kurtosis:.2f} ({kurtosis:.2f} to {2 * kurtosis:.2f})"
    assert row["KL gptq-3bit"].count("0.1") == 3
    assert row["KL gptq-8bit"].startswith("0.000372")


def test_the_csv_has_every_number_in_full_precision(results):
    rows = list(csv.DictReader(analyses_csv(results).splitlines()))
    values = {(row["key"], row["measure"]): row["value"] for row in rows}
    record = results.cells[0]
    mass = record.measured.layers[3].heads[2].mass
    assert float(values[record.key, "layers.3.heads.2.mass"]) == mass
    alone = results.sensitivities[0]
    unit = alone.units[0]
    assert float(values[alone.key, f"{unit.name}.kl.value"]) == unit.kl.value
    assert {row["analysis"] for row in rows} == {"text", "sensitivity"}


def test_cells_that_failed_alike_are_named_in_one_line(tmp_path):
    shutil.copytree(PAIR / "analysis", tmp_path / "analysis")
    analyses = Analyses(tmp_path)
    for record in analyses.records():
        failed = {"status": "failed", "error": "no", "measured": None}
        analyses.put(record.model_copy(update=failed))
    assert load_analyses(Store(tmp_path)).problems == ("softmax/bf16, softpick/bf16: failed: no",)
