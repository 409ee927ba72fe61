"""Cells in parts: their precision in tables and report, and the damage of each part alone."""

import csv
import io
import shutil

import pytest
from synthetic import make_store

from qbench.comparison.compare import compare
from qbench.gate import baseline, check
from qbench.gate.verdict import as_markdown
from qbench.records import ActivationAudit, BatchDependence, Part, Precision
from qbench.store import Store
from qbench.tables import render

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
def store(tmp_path_factory):
    store = make_store(
        tmp_path_factory.mktemp("parts") / "parts",
        quantizers=("bf16", *CELLS),
        sizes={"arc_easy": 60, "wikitext": 12},
    )
    cells = store.manifest().cells
    changed = [
        cell.model_copy(update={"precision": CELLS[cell.quantizer][1]})
        if cell.quantizer in CELLS
        else cell
        for cell in cells
    ]
    for cell in cells:
        if cell.quantizer not in CELLS:
            continue
        record = store.get(cell)
        settings, precision = CELLS[cell.quantizer]
        leak = BatchDependence(
            moved=0.5 if "activations" in settings else 0.0, tolerance=1e-4, declared=True
        )
        more = {"causality": leak, "batch_mates": leak.model_copy(update={"declared": False})}
        if precision.activations:
            more["activations"] = INPUTS
        update = {
            "precision": precision,
            "key_parts": {**record.key_parts, "quantizer": settings},
            "audit": record.audit.model_copy(update=more),
        }
        store.put(record.model_copy(update=update), store.outcomes(record), None)
    store.put_manifest(store.manifest().model_copy(update={"cells": tuple(changed)}))
    return store


@pytest.fixture(scope="module")
def comparison(store):
    return compare(store)


def test_tables_write_weights_activations_and_cache(comparison):
    text = render(comparison)
    assert "hqq-2bit (W16A8, simulated)" in text
    assert "hqq-3bit (W4A8KV4, simulated)" in text
    assert "gptq-8bit (W8A8, real)" in text
    assert "gptq-4bit (W4" not in text
    assert "W, A, KV: bits of weights, activations, KV cache" in text


def test_the_csv_has_each_part_in_a_column(comparison):
    rows = {
        row["quantizer"]: row
        for row in csv.DictReader(io.StringIO(render(comparison, format="csv")))
    }
    names = ("precision", "activations", "arithmetic", "kv_cache")
    shown = [rows["hqq-3bit"][name] for name in names]
    assert shown == ["W4A8KV4", "int8 per token", "simulated", "int4 per head and token"]
    assert rows["gptq-8bit"]["arithmetic"] == "real"
    assert rows["gptq-4bit"]["precision"] == "W4A16"
    assert rows["gptq-4bit"]["activations"] == ""


def test_the_gate_writes_the_precision_and_compares_what_was_measured(store, tmp_path):
    baseline.make(store, tmp_path / "baseline.tar.xz")
    same = check.check(store, tmp_path / "baseline.tar.xz")
    assert same.outcome == "pass"
    assert "softpick/hqq-2bit (W16A8, simulated)" in as_markdown(same)
    shutil.copytree(store.directory, tmp_path / "new")
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
