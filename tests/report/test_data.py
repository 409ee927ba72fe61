"""The report's tables as data."""

from __future__ import annotations

import dataclasses
import re

import pytest
from synthetic import MOMENT, key, make_store

from qbench.comparison.compare import compare
from qbench.comparison.lines import to_bytes
from qbench.report.tables import data_tables, headline

SIZES = {"arc_easy": 120, "lambada_openai": 100, "wikitext": 12}
QUANTIZERS = ("bf16", "gptq-2bit", "gptq-4bit", "hqq-2bit")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    made = make_store(tmp_path_factory.mktemp("data"), sizes=SIZES, quantizers=QUANTIZERS)
    for cell in made.grid().cells:
        record = made.get(cell)
        settings = {"name": cell.quantizer, "group_size": 64, "compute_dtype": "bfloat16"}
        parts = record.key_parts | {
            "quantizer": settings,
            "scoring": {"mode": "exact", "max_length": 2048, "add_bos": False},
            "calibration": {"samples": 128, "length": 2048, "text": "c" * 64},
        }
        made.put(record.model_copy(update={"key_parts": parts}), made.outcomes(record), None)
    return made


@pytest.fixture(scope="module")
def tables(store):
    return data_tables(compare(store))


def named(tables, name):
    return next(table for table in tables if table.name == name)


def test_the_difference_of_damages_comes_first_and_follows_its_keys(tables):
    table = tables[0]
    assert table.name == "differences-points"
    assert table.head[: table.keys] == ("Task", "Metric", "Quantizer")
    assert table.head[table.keys : table.keys + 2] == ("Difference", "95 % interval")
    assert len(table.rows) == 3 * 3


def test_a_precision_is_named_whole_in_every_table(store):
    """Weights of four bits may stand beside quantized activations: 4 alone says too little."""
    from qbench.records import Part, Precision

    comparison = compare(store)
    both = Precision(
        weights=Part(bits=4, scheme="int4"),
        activations=Part(bits=8, scheme="int8 a token", simulated=True),
    )
    lines = tuple(
        dataclasses.replace(line, precision=both) if line.quantizer == "hqq-2bit" else line
        for line in comparison.lines
    )
    found: dict[str, set[str]] = {}
    for table in data_tables(dataclasses.replace(comparison, lines=lines)):
        assert "Bits" not in table.head
        if "Precision" in table.head and "Quantizer" in table.head:
            place = table.head.index("Precision"), table.head.index("Quantizer")
            for row in table.rows:
                found.setdefault(row[place[1]].text, set()).add(row[place[0]].text)
    assert found["gptq-4bit"] == {"W4A16"}
    assert found["bf16"] == {"unquantized"}
    assert "W4A8, simulated" in found["hqq-2bit"]


def test_points_and_ratios_never_share_a_column(tables):
    told = {"points": False, "ratios": True}
    for table in tables:
        kind = table.name.rpartition("-")[2]
        if kind in told:
            for row in table.rows:
                for head, cell in zip(table.head, row, strict=True):
                    if "interval" in head or head in ("Difference", "Detectable"):
                        assert cell.text.startswith("×") == told[kind], (table.name, head)


def test_every_interval_sorts_by_a_number_on_one_scale(tables):
    for table in tables:
        for index, head in enumerate(table.head):
            if "interval" in head:
                assert table.numeric[index]
                lows = [row[index].sort for row in table.rows]
                assert None not in lows
                middle = [row[index - 1].sort for row in table.rows]
                if table.section == "damage":
                    assert all(low <= value for low, value in zip(lows, middle, strict=True))


def test_captions_name_the_tests_and_the_intervals(tables):
    for name in ("differences-points", "damages-points", "scores-points"):
        assert "Tests: " in named(tables, name).caption
        assert "Intervals: " in named(tables, name).caption
    assert "paired t on log-likelihoods" in named(tables, "damages-ratios").caption
    assert "McNemar, exact" in named(tables, "damages-points").caption
    assert re.search(
        r"Tests: .*(, exact; |; .*, exact\.)", named(tables, "differences-points").caption
    )


def test_a_cell_whose_weights_have_no_groups_has_no_levels(store):
    comparison = compare(store)
    record = comparison.records["softmax/bf16"]
    whole = record.model_copy(update={"audit": record.audit.model_copy(update={"levels": 0})})
    records = {**comparison.records, "softmax/bf16": whole}
    found = named(list(data_tables(dataclasses.replace(comparison, records=records))), "audit")
    levels = {row[0].text: row[found.head.index("Levels")].text for row in found.rows}
    assert levels["softmax/bf16"] == "—"
    assert int(levels["softmax/gptq-2bit"]) > 0


def test_settings_of_quantizers_and_their_calibration_are_named(tables):
    rows = [[cell.text for cell in row] for row in named(tables, "quantizers").rows]
    (gptq,) = [row for row in rows if row[0] == "gptq-2bit"]
    assert gptq[1:3] == ["GPTQ", "W2A16"]
    assert "group_size 64" in gptq[3]
    assert gptq[4] == "128 × 2,048 tokens, text cccccccccccc…"


def test_every_other_part_of_the_keys_is_named_with_where_it_holds(tables):
    rows = [tuple(cell.text for cell in row) for row in named(tables, "settings").rows]
    assert ("scoring.mode", "exact", "all cells") in rows
    assert ("versions.torch", "2.11.0", "all cells") in rows
    assert not {"None", "True", "False"} & {value for _, value, _ in rows}
    assert {where for part, _, where in rows if part == "weights.digest"} == {
        "softmax/*",
        "softpick/*",
    }
    assert not any(part.startswith(("quantizer", "calibration")) for part, _, _ in rows)


def test_the_head_names_normalizer_dtype_and_machine(store):
    told = headline(compare(store))
    assert "Normalizer and kernel: softmax/triton, softpick/triton" in told
    assert "Computed in: bfloat16" in told
    assert "Machine: NVIDIA H200 (cuda)" in told


def test_provenance_says_when_each_record_was_made(tables):
    table = named(tables, "provenance")
    assert table.rows[0][-1].text.startswith(f"{MOMENT:%Y-%m-%d}")


def test_deltas_below_the_noise_floor_are_marked_and_the_mark_is_explained(tmp_path):
    store = make_store(tmp_path, sizes=SIZES, quantizers=("bf16", "hqq-2bit"))
    floors = {"arc_easy": {"acc": 1.0}, "wikitext": {"word_perplexity": 0.0}}
    noise = {
        f"{c}/bf16": {"key": key(c, "bf16"), "floors": floors} for c in ("softmax", "softpick")
    }
    (tmp_path / "noise.json").write_bytes(to_bytes(noise))
    marked = set()
    for table in data_tables(compare(store)):
        if table.section == "scores":
            delta = table.head.index("Δ softpick")
            assert "≈: no larger than" in table.caption
            marked |= {
                (row[0].text, row[1].text) for row in table.rows if row[delta].text.endswith("≈")
            }
    assert marked == {("arc_easy", "Acc ↑")}


def test_columns_without_anything_are_left_out(written, tables):
    def head(tables):
        return named(tables, "audit").head

    assert "Why" in head(data_tables(compare(written[0])))
    assert not {"Why", "Left out"} & set(head(tables))
