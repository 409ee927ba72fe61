"""The noise floor that ``qbench noise`` measured, and what the tables make of it."""

import pytest
from synthetic import key, make_store

from qbench.comparison.compare import compare
from qbench.errors import ResultsError
from qbench.records import SCHEMA_VERSION
from qbench.store import with_checksum
from qbench.tables import render

METRIC = ("wikitext", "word_perplexity")
SIZES = {"arc_easy": 60, "wikitext": 30}


def to_bytes(cells):
    return with_checksum({"schema_version": SCHEMA_VERSION, "cells": cells})


def store_with(folder, noise):
    store = make_store(folder, quantizers=("bf16", "gptq-4bit"), sizes=SIZES)
    (folder / "noise.json").write_bytes(noise if isinstance(noise, bytes) else to_bytes(noise))
    return store


def noise(floor, *, made=key):
    task, metric = METRIC
    return {
        f"{name}/bf16": {"key": made(name, "bf16"), "floors": {task: {metric: floor}}}
        for name in ("softmax", "softpick")
    }


def line(comparison, quantizer):
    return next(
        one
        for one in comparison.lines
        if (one.task, one.metric) == METRIC and one.quantizer == quantizer
    )


def test_a_delta_within_both_floors_together_is_marked_and_one_beyond_is_not(tmp_path):
    plain = compare(make_store(tmp_path / "plain", quantizers=("bf16", "gptq-4bit"), sizes=SIZES))
    delta = abs(line(plain, "gptq-4bit").delta("softpick"))
    assert delta > 0
    for floor, marked in ((delta * 0.51, True), (delta * 0.49, False), (0.0, False)):
        folder = tmp_path / str(floor)
        comparison = compare(store_with(folder, noise(floor)))
        assert comparison.below_noise(line(comparison, "gptq-4bit"), "softpick") is marked
        rows = [row for row in render(comparison).splitlines() if row.startswith("| ")]
        row = next(r for r in rows if "gptq-4bit" in r and "Word Perplexity" in r)
        assert ("≈" in row) is marked
        assert "≈" not in "".join(r for r in rows if "Acc" in r)  # its floor is not known
        assert r"$\approx$" in render(comparison, format="tex")  # in the legend
        assert f",{2 * floor}," in render(comparison, format="csv")


def test_noise_of_other_settings_is_not_used_and_said_so(tmp_path):
    text = render(compare(store_with(tmp_path, noise(1e9, made=lambda *_: "0" * 64))))
    assert "≈" not in text
    assert "noise.json has other settings for softmax, softpick" in text


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"{}x", b"{}", to_bytes({"softmax/bf16": {"floors": {}}})]
)
def test_a_file_that_noise_did_not_write_is_named(tmp_path, content):
    with pytest.raises(ResultsError, match=r"noise\.json: .*; run `qbench noise` again"):
        compare(store_with(tmp_path, content))
