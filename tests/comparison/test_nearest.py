"""The verdict: precisions in order, ties, those to avoid; two models; what scores show."""

from dataclasses import replace

import numpy as np
import pytest
from synthetic import make_store

from qbench.comparison.compare import compare
from qbench.comparison.kl import kl_from
from qbench.comparison.rows import Comparison
from qbench.comparison.verdict import nearer, ties, verdict
from qbench.records import Part, Precision, StoredSize
from qbench.statistics import Column
from qbench.tables.summary import WIDTH, summary

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
    return replace(comparison, kl=kl_from(comparison, columns))


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
    found = with_kl(one, {f"mine/{name}": level for name, level in LEVELS.items()})
    (first, second, last) = ties(found, "mine")
    assert {*first} == {"hqq-4bit", "bnb-4bit"}
    assert (second, last) == (["rtn-4bit"], ["gptq-4bit"])
    said = verdict(found)[0]
    assert said.startswith("Nearest to bf16: ")
    assert " = " in said
    assert ", then gptq-4bit (KL " in said


def sized(comparison, sizes, precisions=None):
    """Return the comparison with these GiB and precisions, by quantizer."""
    records = {}
    for cell, record in comparison.records.items():
        size = StoredSize(bits_per_weight=4.5, head_bits_per_weight=None,
                          gib=sizes.get(record.quantizer, 2.0))  # fmt: skip
        changed = {"audit": record.audit and record.audit.model_copy(update={"size": size})}
        if record.quantizer in (precisions or {}):
            changed["precision"] = precisions[record.quantizer]
        records[cell] = record.model_copy(update=changed)
    return replace(comparison, records=records)


INT8 = Part(bits=8, scheme="int8 per token", simulated=True)


@pytest.mark.parametrize(
    ("precision", "avoided", "smallest"),
    [
        (Precision(weights=Part(bits=4, scheme="int4")), True, "rtn-4bit."),
        (Precision(weights=INT8, activations=Part(bits=8, scheme="LLM.int8")), True, "rtn-4bit."),
        (Precision(activations=INT8), False, "rtn-4bit, gptq-4bit (among A8)."),
        (Precision(kv_cache=INT8), False, "rtn-4bit, gptq-4bit (among KV8)."),
    ],
)
def test_only_precisions_that_save_the_same_bytes_are_compared(one, precision, avoided, smallest):
    sizes = dict.fromkeys(LEVELS, 1.0) | {"rtn-4bit": 0.5}
    known = sized(one, sizes, {"gptq-4bit": precision})
    found = with_kl(known, {f"mine/{name}": level for name, level in LEVELS.items()})
    said = verdict(found, margin=1.0)[0]
    assert ("Avoid gptq-4bit: " in said) == avoided
    assert said.endswith(f"Smallest within KL 1: {smallest}")
    assert "Smallest within KL 0.1: rtn-4bit." in verdict(found, margin=0.1)[0]
    assert "None is shown to stay within KL 0.0001." in verdict(found, margin=1e-4)[0]


def test_another_primary_measure_orders_the_precisions(tmp_path):
    store = make_store(tmp_path, checkpoints=("mine",), quantizers=QUANTIZERS,
                       sizes={"arc_easy": 900}, shift={"mine/hqq-4bit": 2.0})  # fmt: skip
    store.put_manifest(store.manifest().model_copy(update={"primary": "arc_easy/acc"}))
    found = compare(store)
    assert ties(found, "mine")[-1] == ["hqq-4bit"]
    said = verdict(found)[0]
    assert said.startswith("By loss in arc_easy/acc, the smallest first: ")
    assert ", then hqq-4bit (+" in said
    assert " and nearer" not in said


def test_another_primary_measure_compares_models(tmp_path):
    store = make_store(tmp_path, quantizers=("bf16", "hqq-4bit"), sizes={"arc_easy": 900},
                       shift={"softpick/hqq-4bit": 2.0})  # fmt: skip
    store.put_manifest(store.manifest().model_copy(update={"primary": "arc_easy/acc"}))
    said = verdict(compare(store))[0]
    assert said.startswith("What softpick loses in arc_easy/acc more than softmax: hqq-4bit (+")
    assert "‡ [+" in said


def test_the_terminal_names_the_nearest_alone(one):
    found = with_kl(one, {f"mine/{name}": level for name, level in LEVELS.items()})
    said = verdict(found, most=3)[0]
    assert ", then rtn-4bit (KL " in said
    assert "), and 1 more (tables.md)." in said
    assert "gptq-4bit (KL " not in said


def test_every_other_model_has_a_sentence(three):
    """The headline returned at the first one, which was not hurt."""
    levels = {"base": 0.02, "same": 0.02, "hurt": 0.4}
    found = with_kl(three, {f"{model}/{name}": level for model, level in levels.items()
                            for name in ("hqq-4bit", "hqq-2bit")})  # fmt: skip
    said = verdict(found)
    assert said[0].startswith(
        "Quantization is not shown to move same farther or less far than base"
    )
    assert said[1].startswith("Quantization moves hurt farther from itself than base: KL × ")
    assert "A ratio of × 1." in said[0]
    assert sum("In scores" in line for line in said) == 2
    hurt = next(line for line in said if line.startswith("In scores hurt"))
    assert "hurt loses more than base in 4 of 4 comparisons and less in 0" in hurt


def test_a_folder_without_records_or_quantized_columns_says_so(one, tmp_path):
    empty = Comparison(grid=one.grid, records={}, lines=(), tested=True)
    assert verdict(empty) == ["No cell has a record yet."]
    store = make_store(tmp_path, quantizers=("bf16",), sizes={"arc_easy": 60},
                       shift={"softpick/bf16": 4.0})  # fmt: skip
    (said,) = verdict(compare(store))
    assert said.startswith("softpick is better than softmax in 0 of 2 scores and worse in 2")


def test_what_is_not_significant_says_what_is_excluded(one):
    said = verdict(one)[-1]
    assert "would have been seen" in said
    assert "none is worse by more than" in said
    assert "documents would show that it stays within 1 point" in said


def test_the_summary_fits_100_columns_and_has_a_line_per_precision(one, three):
    for comparison, rows in ((one, 5), (three, 9)):
        lines = summary(comparison).splitlines()
        assert max(map(len, lines)) <= WIDTH
        assert sum(line.startswith("| ") for line in lines) == rows + 1  # and the head


@pytest.mark.slow
def test_an_equal_precision_is_called_nearer_in_at_most_5_of_100_runs(one):
    """In 400 runs of four equal precisions, with heavy tails and shared documents."""
    wrong = 0
    for seed in range(400):
        found = with_kl(one, {f"mine/{name}": 0.02 for name in LEVELS}, documents=60, seed=seed)
        wrong += any(nearer(found, "mine", a, b) for a in LEVELS for b in LEVELS)
    assert wrong / 400 <= 0.05
