"""What quantization changed stands in every format; damage is held against the same dtype."""

import csv
import io
import re
from pathlib import Path

import pytest
from synthetic import make_store

from qbench import records
from qbench.comparison.compare import chance_of_tasks, compare
from qbench.comparison.verdict import verdict
from qbench.store import Store
from qbench.tables import render, summary
from qbench.text import MINUS
from qbench.viewer.data import Results

pytestmark = pytest.mark.usefixtures("few_rounds")
SIZES = {"arc_easy": 60, "lambada_openai": 80, "wikitext": 9}
COLUMNS = ("bf16", "gptq-4bit", "hqq-4bit", "hqq-2bit")
KL = {"gptq-4bit": 0.02, "hqq-4bit": 0.021, "hqq-2bit": 0.9}


def measured(path, checkpoints=("mine",), stderr=0.002, sizes=SIZES, **settings):
    """Records with divergences, flips, sizes and a group, as a run leaves them."""
    store = make_store(path, checkpoints=checkpoints, sizes=sizes, quantizers=COLUMNS, **settings)
    for cell in store.manifest().cells:
        record = store.get(cell)
        more = {}
        if cell.quantized:
            size = records.StoredSize(
                bits_per_weight=4.5, head_bits_per_weight=None, gib=cell.precision.weights.bits / 4
            )
            kl = records.Divergence(
                mean=KL[cell.quantizer], mean_stderr=stderr, median=0, p90=0, p99=0.5, p99_9=1,
                largest=2,
            )  # fmt: skip
            distributions = records.Distributions(
                tokens=100, kl=kl, top1_agreement=0.93,
            )  # fmt: skip
            tasks = {task: records.TaskDamage(distributions=distributions) for task in SIZES}
            audit = record.audit.model_copy(update={"size": size})
            more = {"audit": audit, "damage": records.Damage(tasks=tasks)}
        group = records.GroupScore(
            group="mmlu", label="mmlu", metric="acc", value=0.3125, stderr=0.01,
            higher_is_better=True, weight_by_size=True, documents=140,
            tasks=("arc_easy", "lambada_openai"),
        )  # fmt: skip
        changed = record.model_copy(update={**more, "groups": (group,)})
        store.put(changed, store.outcomes(record), None)
    return store


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("one") / "mine", shift={"mine/hqq-2bit": 1.0})


def test_a_row_a_precision_says_bits_size_score_damage_and_divergence(mine):
    text = render(compare(mine))
    head, row = next(
        (lines[0], next(line for line in lines if "hqq-2bit" in line))
        for block in text.split("\n\n")
        if (lines := block.splitlines())[0].startswith("| Task")
    )
    named = dict(
        zip(*([c.strip() for c in x.strip("|").split("|")] for x in (head, row)), strict=True)
    )
    assert named["GiB"] == "0.5"
    assert named["KL"] == "0.9"
    assert named["KL p99"] == "0.5"
    assert named["Same top token"] == "93.0 %"
    assert named["Damage"].startswith("+")  # positive is worse


def test_a_loss_has_one_sign_in_every_output(mine):
    """In the tables, the terminal, the CSV and the viewer, of accuracies and of perplexities."""
    comparison = compare(mine)
    hurt = [line for line in comparison.lines if line.quantizer == "hqq-2bit"]
    hurt = [line for line in hurt if line.of("damages")]
    assert {line.metric for line in hurt} >= {"acc", "perplexity", "word_perplexity"}
    assert all(line.of("damages")["mine"].estimate > 0 for line in hurt)
    for text in (render(comparison), summary(comparison)):
        (row,) = [one for one in text.splitlines() if re.match(r"\| (mine )?hqq-2bit", one)][:1]
        assert re.search(r"\+\d", row)
        assert MINUS not in row
    rows = list(csv.DictReader(io.StringIO(render(comparison, format="csv"))))
    damages = [row["damage"] or row["damage_log_ratio"] for row in rows
               if row["quantizer"] == "hqq-2bit"]  # fmt: skip
    assert all(float(damage) > 0 for damage in filter(None, damages))
    shown = Results(mine).payload("overview", wait=True)["lines"]
    viewed = [one["damages"] for one in shown if one["quantizer"] == "hqq-2bit"]
    assert all(each["estimate"] > 0 for damages in viewed for each in damages.values())
    assert sum(map(len, viewed)) > 4  # one of each pair of redundant metrics is shown


@pytest.mark.parametrize("checkpoints", [("mine",), ("softmax", "softpick")])
def test_one_document_has_no_damage_and_it_is_said_beside_what_there_is(tmp_path, checkpoints):
    store = measured(tmp_path / "one", checkpoints, sizes={"arc_easy": 1, "wikitext": 1})
    comparison = compare(store)
    text = render(comparison)
    assert "fewer than two documents are shared" in text
    flips = [one for tasks in comparison.flips.values() for one in tasks["arc_easy"].values()]
    shown = any(f" {one.right_to_wrong} / {one.wrong_to_right} " in text for one in flips)
    assert ("Same top token" in text, shown) == (len(checkpoints) == 1,) * 2


def test_two_checkpoints_have_divergence_flips_and_bits_in_the_csv(tmp_path):
    comparison = compare(measured(tmp_path / "two", checkpoints=("softmax", "softpick")))
    rows = list(csv.DictReader(io.StringIO(render(comparison, format="csv"))))
    row = next(r for r in rows if (r["quantizer"], r["metric"]) == ("hqq-2bit", "acc"))
    assert [row[n] for n in ("bits_per_weight", "gib", "kl_mean")] == ["4.5", "0.5", "0.9"]
    flips = comparison.flips[f"{row['checkpoint']}/hqq-2bit"][row["task"]]["acc"]
    assert row["right_to_wrong"] == str(flips.right_to_wrong)


def test_damage_is_against_the_unquantized_column_of_the_same_dtype(tmp_path):
    """As KL divergence is; the first unquantized one was taken for all. Without one of the same
    dtype there is none, and the table says so."""
    store = make_store(
        tmp_path, checkpoints=("mine",), quantizers=("fp32", "bf16", "hqq-4bit"), sizes=SIZES
    )
    dtypes = {"fp32": "float32", "bf16": "bfloat16", "hqq-4bit": "bfloat16"}
    for cell in store.manifest().cells:
        record = store.get(cell)
        name = "compute_dtype" if cell.quantized else "dtype"
        parts = {**record.key_parts, "quantizer": {name: dtypes[cell.quantizer]}}
        changed = record.model_copy(update={"key_parts": parts})
        store.put(changed, store.outcomes(record), None)
    comparison = compare(store)
    assert comparison.unquantized_of["hqq-4bit"] == "bf16"
    values = {line.quantizer: line for line in comparison.lines if line.metric == "acc_norm"}
    whole, quantized = (values[q].entries["mine"].value for q in ("bf16", "hqq-4bit"))
    damage = values["hqq-4bit"].of("damages")["mine"].estimate
    assert damage == pytest.approx(whole - quantized, abs=1e-12)
    cells = [cell for cell in store.manifest().cells if cell.quantizer != "bf16"]
    store.put_manifest(store.manifest().model_copy(update={"cells": tuple(cells)}))
    comparison = compare(store)
    assert not any(line.of("damages") for line in comparison.lines)
    said = "mine/hqq-4bit: no damage: no unquantized column computes in bfloat16, as hqq-4bit does"
    assert said in render(comparison)


@pytest.mark.parametrize("guessing", [False, True])
def test_tasks_at_chance_are_named_and_leave_the_family(tmp_path, monkeypatch, guessing):
    store = make_store(
        tmp_path, checkpoints=("mine",), quantizers=("bf16", "hqq-2bit"),
        sizes={"arc_easy": 400, "piqa": 400}, shift={"mine/hqq-2bit": 1.0},
    )  # fmt: skip
    before, _ = (
        row.entries["mine"].value
        for row in compare(store, statistics=False).lines
        if (row.task, row.metric) == ("arc_easy", "acc")
    )
    chance = {"arc_easy": before if guessing else 0.1}
    monkeypatch.setattr("qbench.comparison.compare.chance_of_tasks", lambda *_: chance)
    result = compare(store)
    assert (("mine", "arc_easy", "acc") in result.at_chance) is guessing
    assert ("At chance unquantized" in render(result)) is guessing
    names = ("arc_easy", "acc", True)
    row = next(r for r in result.lines if (r.task, r.metric, r.quantized) == names)
    assert (row.of("damages")["mine"].p_holm is None) is guessing


def test_chance_is_one_of_the_choices_and_0_without_any():
    store = Store(Path(__file__).parents[2] / "results" / "published-27m-gguf")
    result = chance_of_tasks(compare(store, statistics=False), store)
    assert (result["piqa"], result["lambada_openai"]) == (0.5, 0.0)
    assert result["arc_easy"] == pytest.approx(0.25, abs=0.001)  # a few have three or five choices


FILES = {"weights": "a", "config": "b", "tokenizer": "c"}
GONE = {"damage": records.Unavailable(reason="the hidden states are gone")}


@pytest.mark.parametrize(
    ("columns", "change", "other", "said"),
    [
        (("hqq-4bit",), {}, {}, "no damage: the run has no unquantized column"),
        (("bf16", "hqq-4bit"), GONE, {}, "no KL divergence: the hidden states are gone"),
        (("bf16", "hqq-4bit"), {}, {"weights": "d"},
         "no damage: made from other weights than mine/bf16"),
        (("bf16", "hqq-4bit"), {}, {"tokenizer": "d"},  # was called other weights
         "no damage: made from another tokenizer than mine/bf16"),
    ],
)  # fmt: skip
def test_why_there_is_no_damage_is_said(tmp_path, columns, change, other, said):
    store = make_store(tmp_path, checkpoints=("mine",), quantizers=columns, sizes=SIZES)
    for cell in store.manifest().cells:
        record, files = store.get(cell), FILES | (other if cell.quantized else {})
        parts = {**record.key_parts, "weights": str(files), "checkpoint": files}
        update = {"key_parts": parts, **change}
        store.put(record.model_copy(update=update), store.outcomes(record), None)
    comparison = compare(store)
    assert f"mine/hqq-4bit: {said}" in render(comparison)
    first = "There is no damage: the run has no unquantized col"
    assert verdict(comparison)[0].startswith(first) == (len(columns) == 1)


def test_a_copy_that_is_scored_alone_shows_its_scores(tmp_path):
    store = make_store(tmp_path, checkpoints=("mine",), quantizers=("hqq-4bit",), sizes=SIZES)
    shown = summary(compare(store))
    assert re.search(r"\| hqq-4bit .*— \| +\d+\.\d\d \| +\d+\.\d\d \| +\d+\.\d\d \|", shown)
    assert "Word Perplexity): the score." in " ".join(shown.split())


def test_a_score_of_all_documents_at_once_says_that_it_has_no_test(tmp_path):
    store = make_store(tmp_path, checkpoints=("mine",), quantizers=("bf16", "hqq-4bit"))
    for record in store.records():
        bleu = record.scores[0].model_copy(update={"metric": "bleu", "aggregation": "bleu"})
        scores = {"scores": (*record.scores, bleu)}
        store.put(record.model_copy(update=scores), store.outcomes(record), None)
    reason = "Bleu hqq-4bit of mine: no test is known for scores that are aggregated as bleu."
    assert reason in render(compare(store))
