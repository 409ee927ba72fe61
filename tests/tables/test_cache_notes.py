"""The KV cache's memory, below the tables."""

from dataclasses import replace

import pytest
from synthetic import make_store

from qbench.comparison.compare import compare
from qbench.records import (
    DifferenceFromExact,
    KVAudit,
    Part,
    Precision,
    SampleDifference,
    ScoringReport,
)
from qbench.tables import render
from qbench.tables.scores import bos_notes


def cache(bytes_per_token: float) -> KVAudit:
    return KVAudit(
        levels=15,
        clipped=0.0,
        key_error=0.105,
        value_error=0.09,
        tokens=2048,
        bits_per_value=4.25,
        bytes_per_token=bytes_per_token,
        unquantized_bytes_per_token=18432.0,
    )


@pytest.fixture
def comparison(tmp_path):
    store = make_store(
        tmp_path / "kv", quantizers=("bf16", "hqq-2bit", "hqq-3bit"), sizes={"arc_easy": 60}
    )
    precision = Precision(kv_cache=Part(bits=4, scheme="int4 per head and token", simulated=True))
    for cell in store.manifest().cells:
        record = store.get(cell)
        if cell.quantizer == "hqq-3bit" or (cell.cell == "softpick/hqq-2bit"):
            size = 4896.0 if cell.quantizer == "hqq-2bit" else 9504.0
            audit = record.audit.model_copy(update={"kv_cache": cache(size)})
            changes = {"audit": audit, "precision": precision}
            store.put(record.model_copy(update=changes), store.outcomes(record), None)
    return compare(store)


@pytest.mark.parametrize("format", ["md", "tex"])
def test_the_memory_of_a_token_stands_below_the_table(comparison, format):
    text = render(comparison, format=format)
    assert text.count("of 2,048 tokens, bytes per token with scales: unquantized 18,432; ") == 1
    assert "hqq-2bit 4,896; hqq-3bit 9,504." in text


def test_a_note_says_how_fast_scores_were_judged(tmp_path):
    store = make_store(tmp_path / "kv", quantizers=("bf16", "hqq-2bit"), sizes={"arc_easy": 60})
    assert "judged by" not in render(compare(store))
    about = {"documents": 32, "requests": 128, "largest_per_token": 1.5, "changed_answers": 3}
    for bias, cell in zip((0.01, -0.031), store.manifest().cells[1::2], strict=True):
        sample = SampleDifference(
            task="arc_easy", mean_per_token=0.36, bias_per_token=bias, bias_stderr=0.02,
            by_bias=True, **about,
        )  # fmt: skip
        difference = DifferenceFromExact(
            largest=9.0, mean=1.0, mean_per_token=0.36, samples=(sample,), **about
        )
        report = ScoringReport(
            mode="fast", softmax_dtype="float32", batching="packed", peak_memory_gib=1.0,
            difference_from_exact=difference,
        )  # fmt: skip
        record = store.get(cell)
        changed = record.model_copy(update={"scoring": report})
        store.put(changed, store.outcomes(record), None)
    text = render(compare(store))
    assert "by up to 0.36 nats a token" in text
    assert "judged by their signed mean, at most −0.031 ± 0.02." in text


@pytest.mark.parametrize(
    ("bos", "line"),
    [
        ((None, None), None),  # earlier records do not say
        ((False, False), "Texts begin without BOS."),
        ((True, True), "Texts begin with BOS; those of wikitext with two, as in lm-eval."),
        (
            (False, True),
            "Texts of softpick begin with BOS; those of wikitext with two, as in lm-eval.",
        ),
    ],
)
def test_the_tables_say_whether_texts_began_with_bos(comparison, bos, line):
    records = {
        name: record.model_copy(
            update={
                "scoring": ScoringReport(
                    mode="exact",
                    softmax_dtype="float32",
                    batching="padded",
                    peak_memory_gib=0.0,
                    bos=(flag := bos[record.checkpoint == "softpick"]),
                    doubled_bos=("wikitext",) if flag else (),
                )
            }
        )
        for name, record in comparison.records.items()
    }
    assert bos_notes(replace(comparison, records=records)) == ([line] if line else [])
