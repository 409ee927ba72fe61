"""The verdict: precisions in order, ties, those to avoid; two models; what scores show."""

from dataclasses import replace

import numpy as np
import pytest
from synthetic import make_store

from qbench import records
from qbench.comparison.compare import compare
from qbench.comparison.losses import kl_from
from qbench.comparison.rows import Comparison
from qbench.comparison.verdict import ties, verdict
from qbench.records import Part, Precision
from qbench.statistics import Column
from qbench.tables import WIDTH, summary

pytestmark = pytest.mark.usefixtures("few_rounds")
QUANTIZERS = ("bf16", "hqq-4bit", "bnb-4bit", "rtn-4bit", "gptq-4bit")
LEVELS = {"hqq-4bit": 0.02, "bnb-4bit": 0.02, "rtn-4bit": 0.03, "gptq-4bit": 0.4}


def column(rng, common, level):
    values = level * np.exp(common + 0.4 * rng.normal(size=len(common)))
    return Column.of(np.arange(len(common)), values, np.ones(len(common)))


def with_kl(comparison, levels, documents=200, seed=0):
    """Return the comparison with KL divergences by document of these means, by cell."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=documents)
    columns = {cell: column(rng, common, level) for cell, level in levels.items()}
    losses = kl_from(comparison, columns)
    return replace(comparison, kl=losses, primary=losses)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    store = make_store(
        tmp_path_factory.mktemp("one"), checkpoints=("mine",), quantizers=QUANTIZERS,
        sizes={"arc_easy": 40},
    )  # fmt: skip
    return compare(store)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    store = make_store(
        tmp_path_factory.mktemp("three"), checkpoints=("base", "same", "hurt"),
        quantizers=("bf16", "hqq-4bit", "hqq-2bit"), sizes={"arc_easy": 200},
        shift={"hurt/hqq-2bit": 3.0, "hurt/hqq-4bit": 3.0},
    )  # fmt: skip
    return compare(store)


def test_precisions_are_ordered_and_ties_stand_together(one):
    result = with_kl(one, {f"mine/{name}": level for name, level in LEVELS.items()})
    (first, second, last) = ties(result, "mine")
    assert {*first} == {"hqq-4bit", "bnb-4bit"}
    assert (second, last) == (["rtn-4bit"], ["gptq-4bit"])
    said = verdict(result)[0]
    assert said.startswith("Nearest to bf16: ")
    assert " = " in said
    assert ", then gptq-4bit (KL " in said


def sized(comparison, sizes, precisions):
    """Return the comparison with these GiB and precisions, by quantizer."""
    made = {}
    for cell, record in comparison.records.items():
        size = records.StoredSize(bits_per_weight=4.5, head_bits_per_weight=None,
                                  gib=sizes.get(record.quantizer, 2.0))  # fmt: skip
        changed = {"audit": record.audit and record.audit.model_copy(update={"size": size}),
                   "precision": precisions.get(record.quantizer, record.precision)}  # fmt: skip
        made[cell] = record.model_copy(update=changed)
    return replace(comparison, records=made)


INT8 = Part(bits=8, scheme="int8 per token", simulated=True)


@pytest.mark.parametrize(
    ("precision", "avoided", "smallest"),
    [
        (Precision(weights=Part(bits=4, scheme="int4")), True, "rtn-4bit."),
        (
            Precision(weights=INT8, activations=Part(bits=8, scheme="LLM.int8")),
            True,
            "rtn-4bit.",
        ),
        (Precision(activations=INT8), False, "rtn-4bit; with 8-bit activations gptq-4bit."),
        (Precision(kv_cache=INT8), False, "rtn-4bit; with 8-bit KV cache gptq-4bit."),
    ],
)
def test_only_precisions_that_save_the_same_bytes_are_compared(
    one, monkeypatch, precision, avoided, smallest
):
    sizes = dict.fromkeys(LEVELS, 1.0) | {"rtn-4bit": 0.5}
    with_sizes = sized(one, sizes, {"gptq-4bit": precision})
    result = with_kl(with_sizes, {f"mine/{name}": level for name, level in LEVELS.items()})

    def within(margin):
        monkeypatch.setattr("qbench.comparison.verdict.MARGIN_KL", margin)
        return verdict(replace(result))[0]

    said = within(1.0)
    assert ("Avoid, because another is nearer and no larger: gptq-4bit (" in said) == avoided
    assert said.endswith(f"within a KL of 1.00 (95 % for all together): {smallest}")
    assert "within a KL of 0.10 (95 % for all together): rtn-4bit." in within(0.1)
    assert "None is shown to stay within a KL of 0.0001" in within(1e-4)


ONE = {"checkpoints": ("mine",), "quantizers": QUANTIZERS, "shift": {"mine/hqq-4bit": 2.0}}
TWO = ("bf16", "hqq-4bit", "bnb-4bit")


@pytest.mark.parametrize(
    ("primary", "settings", "parts"),
    [
        ("arc_easy/acc", ONE, (
            "Least loss in arc_easy/acc from bf16: ", ", then hqq-4bit (+", " = ",
            "Smallest difference that these documents would show between two precisions: ",
            " points. ", "None is shown to stay within 1.00 points.")),
        ("lambada_openai/perplexity", ONE, (", then hqq-4bit (× ", " stay within × 1.020")),
        ("arc_easy/acc", {"quantizers": TWO[:2], "shift": {"softpick/hqq-4bit": 2.0}}, (
            "Quantization costs softpick more than softmax: its loss in arc_easy/acc minus "
            "softmax’s is +",
            "], of one precision. Smallest difference that these documents would show: ")),
        ("arc_easy/acc", {"quantizers": TWO, "shift": dict.fromkeys(
            ("softpick/hqq-4bit", "softpick/bnb-4bit"), 0.125)}, (
            "Quantization is not shown to cost softpick more or less than softmax: ",
            ", mean over 2 precisions; none of them alone is significant ", "At most it is ",
            "documents would show at most 1.00")),
    ],
    ids=["one model", "a perplexity", "two models", "two models, no difference"],
)  # fmt: skip
def test_another_primary_measure_has_the_same_answers(tmp_path, primary, settings, parts):
    store = make_store(tmp_path, sizes={primary.split("/")[0]: 900}, **settings)
    store.put_manifest(store.manifest().model_copy(update={"primary": primary}))
    said = verdict(compare(store))[0]
    assert all(part in said for part in parts), said
    assert "KL" not in said


def test_every_other_model_has_a_sentence(three):
    """The headline returned at the first one, which was not hurt."""
    levels = {"base": 0.02, "same": 0.02, "hurt": 0.4}
    result = with_kl(three, {f"{model}/{name}": level for model, level in levels.items()
                            for name in ("hqq-4bit", "hqq-2bit")})  # fmt: skip
    same, hurt, *scores = verdict(result)
    assert same.startswith("Quantization is not shown to cost same more or less than base: its KL ")
    assert " Smallest ratio of KL that these documents would show: × 1." in same
    assert " At most it is × 1." in same
    assert " documents would show at most × 1.1" in same
    assert hurt.startswith("Quantization costs hurt more than base: its KL is × ")
    assert "larger for 2 of them, smaller for 0" in hurt
    assert [line.startswith("Scores (secondary): ") for line in scores] == [True, True]
    assert "hurt loses more than base in 4 of 4 comparisons and less in 0" in scores[1]
    # Holm's families: contrasts of two models and two quantizers, and both means over quantizers
    families = [{each.family for each in answers.values()}
                for answers in (result.primary.contrasts, result.primary.overall)]  # fmt: skip
    assert families == [{4}, {2}]


@pytest.mark.parametrize(
    ("factor", "worse", "trainings"),
    [(3.0, True, 3), (1.0, False, 2)],
    ids=["pairs", "unequal numbers"],
)
def test_kl_over_trainings_has_one_interval_over_documents_and_seeds(
    tmp_path, factor, worse, trainings, monkeypatch
):
    monkeypatch.setattr("qbench.statistics.intervals.ROUNDS", 500)
    groups = {"base": ["base-0", "base-1", "base-2"],
              "other": [f"other-{seed}" for seed in range(trainings)]}  # fmt: skip
    store = make_store(
        tmp_path, checkpoints=[*groups["base"], *groups["other"]],
        quantizers=("bf16", "hqq-4bit", "hqq-2bit"), sizes={"arc_easy": 40}, replicates=groups,
    )  # fmt: skip
    between = iter(np.exp(np.random.default_rng(4).normal(0, 0.05, 12)))
    levels = {
        f"{member}/{name}": 0.02 * (factor if group == "other" else 1.0) * next(between)
        for group, members in groups.items() for member in members
        for name in ("hqq-4bit", "hqq-2bit")
    }  # fmt: skip
    comparison = with_kl(compare(store), levels)
    answer = comparison.primary.overall["other"]
    assert (answer.seeds, len(answer.each)) == (trainings, 3 if trainings == 3 else 5)
    assert answer.low < np.log(factor) < answer.high
    assert answer.significant == worse
    said = verdict(comparison)[0]
    claim = "costs other more than base" if worse else "is not shown to cost other more or less"
    assert said.startswith(f"Quantization {claim}")
    assert "base/hqq-4bit" in summary(comparison)


@pytest.mark.parametrize(
    ("documents", "reason"),
    [
        (None, "records of earlier versions hold no KL by document."),
        (12, "12 documents: fewer than 20 say too little of a KL mean."),
    ],
)
def test_without_an_interval_the_sizes_are_said_with_the_reason(three, one, documents, reason):
    """It said that the records hold no KL by document, whatever the reason was."""

    levels = dict.fromkeys(("mean", "median", "p90", "p99", "p99_9", "largest"), 0.02)
    kl = records.Divergence(**levels)
    spread = records.Distributions(tokens=9, kl=kl, top1_agreement=0.9)
    damage = records.Damage(tasks={"arc_easy": records.TaskDamage(distributions=spread)})

    def with_damage(comparison):
        damaged = {cell: record.model_copy(update={"damage": damage})
                   for cell, record in comparison.records.items()}  # fmt: skip
        comparison = replace(comparison, records=damaged)
        cells = [cell.cell for cell in comparison.grid.cells if cell.quantized]
        if documents:
            return with_kl(comparison, dict.fromkeys(cells, 0.02), documents)
        losses = kl_from(comparison, dict.fromkeys(cells))
        return replace(comparison, kl=losses, primary=losses)

    same = verdict(with_damage(three))[0]
    assert same.startswith("same: its KL is × ")
    assert same.endswith(f"over 2 precisions, without an interval: {reason}")
    assert f"Without an interval: {reason}" in verdict(with_damage(one))[0]


def test_a_folder_without_records_or_quantized_columns_says_so(one, tmp_path):
    empty = Comparison(grid=one.grid, records={}, lines=(), tested=True)
    assert verdict(empty) == ("No cell has a record yet.",)
    store = make_store(tmp_path, quantizers=("bf16",), sizes={"arc_easy": 60},
                       shift={"softpick/bf16": 4.0})  # fmt: skip
    (said,) = verdict(compare(store))
    assert said.startswith("softpick is better than softmax in 0 of 2 scores and worse in 2")


def test_what_is_not_significant_says_what_is_excluded(one):
    said = verdict(one)[-1]
    assert "With 40 documents per task, only a loss of " in said
    assert "Losses that are not significant are at most " in said
    assert " documents would show at most 1 point." in said


def test_the_summary_fits_100_columns_and_has_a_line_per_precision(one, three):
    for comparison, rows in ((one, 5), (three, 9)):
        lines = summary(comparison).splitlines()
        assert max(map(len, lines)) <= WIDTH
        assert sum(line.startswith("| ") for line in lines) == rows + 1  # and the head
