"""Cells whose products are real: decided when planned, audited, equal to their simulation."""

import pytest
import torch
from quantizer_models import calibration, damage, ids, logits, needs_vnni
from test_treated_cells import judged, make
from torch import nn
from treated_models import decoder

from qbench.errors import QuantizationError, RecipeError
from qbench.quantizers import config_of
from qbench.quantizers.products import real
from qbench.quantizers.products.layers import ScaledLinear

WHICH = "llama-wide"  # widths are multiples of 16
CONFIG = {"hidden_size": 64, "intermediate_size": 96}


def cell(entry, device="cpu", dtype="float32", config=CONFIG):
    entry = {"name": entry} if isinstance(entry, str) else entry
    return config_of(entry, compute_dtype=dtype).resolved(config, device)


def parts(weights, activations, arithmetic, **more):
    named = {"name": activations, "arithmetic": arithmetic}
    return {"weights": weights, "activations": named, **more}


@needs_vnni
@pytest.mark.parametrize("activations", ["int8-token", "int8-static", "int8-tensor"])
@pytest.mark.parametrize("outliers", [None, "smoothquant", "rotation"])
def test_real_int8_on_a_cpu_passes_its_audit_and_equals_its_simulation(
    activations, outliers, tmp_path
):
    more = {} if outliers is None else {"outliers": outliers}
    found = {}
    for arithmetic in ("real", "simulated"):
        chosen = cell(parts("int8-row", activations, arithmetic, **more))
        model = make(chosen, tmp_path / arithmetic, WHICH).model
        layers = [m for m in model.modules() if isinstance(m, ScaledLinear)]
        assert len(layers) == 14
        report = judged(chosen, model, WHICH)
        kind = {"real": "RealLinear", "simulated": "ScaledLinear"}[arithmetic]
        assert {module.kind for module in report.modules} == {kind}
        assert report.problems == ()
        assert (report.coverage, report.bits) == (1.0, 8)
        assert chosen.precision.activations.simulated == (arithmetic == "simulated")
        found[arithmetic] = logits(model, ids(3, 2, 40))
    original = logits(decoder(WHICH), ids(3, 2, 40))
    harm = (found["simulated"] - original).norm()
    assert (found["real"] - found["simulated"]).norm() < 0.05 * harm


@pytest.mark.parametrize(
    ("entry", "device", "dtype", "config", "says"),
    [
        ("w8a8-int8", "cpu", "float32", CONFIG, "int8-token: arithmetic auto: real"),
        (
            "w8a8-fp8", "cpu", "bfloat16", CONFIG,
            "fp8-row: arithmetic auto: simulated, since fp8 products need a GPU",
        ),
        (
            "w8a8-fp8", "cpu", "float32", CONFIG,
            "fp8-row: arithmetic auto: simulated, since fp8 products give bfloat16, not float32",
        ),
        (
            "w8a8-fp8", "cpu", "bfloat16", {"hidden_size": 40},
            "fp8-row: arithmetic auto: simulated, since hidden_size 40 is no multiple of 16",
        ),
        (
            parts("gptq-8bit", "int8-token", "auto"), "cpu", "float32", CONFIG,
            "int8-token: arithmetic auto: simulated, since it takes weights: int8-row, not "
            "gptq-8bit",
        ),
        (
            parts("int8-row", "int8-token-asymmetric", "auto"), "cpu", "float32", CONFIG,
            "int8-token-asymmetric: arithmetic auto: simulated, since products of hardware take "
            "no int8 per token, asymmetric",
        ),
        (parts("int8-row", "int8-token", "simulated"), "cpu", "float32", CONFIG, ""),
    ],
)  # fmt: skip
def test_auto_is_decided_when_planned_and_says_why(entry, device, dtype, config, says, monkeypatch):
    monkeypatch.setattr("qbench.machine.devices.cpu_flags", lambda: frozenset({"avx_vnni"}))
    chosen = cell(entry, device, dtype, config)
    assert chosen.chosen == says
    assert chosen.to_dict()["activations"]["arithmetic"] == (
        "real" if says.endswith("real") else "simulated"
    )
    assert ("torchao" in chosen.requirements) == says.endswith("real")


@pytest.mark.parametrize(
    ("here", "says"),
    [
        ((9, 0), "real"),
        ((8, 9), "real"),
        (
            (8, 0),
            "simulated, since fp8 products need a GPU of compute capability 8.9, and this one "
            "has 8.0",
        ),
    ],
)
def test_fp8_asks_the_gpu(here, says, monkeypatch):
    monkeypatch.setattr("qbench.machine.devices.capability", lambda: here)
    chosen = cell("w8a8-fp8", "cuda", "bfloat16")
    assert chosen.chosen == f"fp8-row: arithmetic auto: {says}"


def test_a_cpu_without_vnni_simulates(monkeypatch):
    monkeypatch.setattr("qbench.machine.devices.cpu_flags", lambda: frozenset({"avx2"}))
    assert cell("w8a8-int8").chosen == (
        "int8-token: arithmetic auto: simulated, since int8 sums saturate on this CPU, which has "
        "no VNNI"
    )


def test_real_that_cannot_be_is_refused_before_work():
    with pytest.raises(RecipeError) as raised:
        cell(parts("bnb-4bit", "int8-token", "real"))
    assert str(raised.value) == (
        "int8-token: arithmetic: real: it takes weights: int8-row, not bnb-4bit; say simulated "
        "or auto"
    )


def test_an_undecided_choice_does_not_run(tmp_path):
    undecided = config_of({"name": "w8a8-int8"}, compute_dtype="float32")
    assert undecided.precision.activations.simulated is None
    with pytest.raises(QuantizationError, match="auto is decided where a run is planned"):
        make(undecided, tmp_path, WHICH)


@needs_vnni
def test_a_layer_left_out_of_both_parts_stays_whole(tmp_path):
    entry = {
        "weights": {"name": "int8-row", "ignore": ["down_proj"]},
        "activations": {"name": "int8-token", "arithmetic": "real", "ignore": ["down_proj"]},
    }
    chosen = cell(entry)
    model = make(chosen, tmp_path, WHICH).model
    assert type(model.model.layers[0].mlp.down_proj) is nn.Linear
    assert judged(chosen, model, WHICH).problems == ()
    entry["activations"] = {"name": "int8-token", "arithmetic": "auto"}
    assert cell(entry).chosen.endswith("since weights leave down_proj out and activations do not")


@needs_vnni
def test_a_layer_that_stopped_multiplying_codes_fails_its_audit(tmp_path):
    """As where a library leaves a layer out in silence."""
    chosen = cell(parts("int8-row", "int8-token", "real"))
    model = make(chosen, tmp_path, WHICH).model
    model.model.layers[1].mlp.up_proj.__class__ = ScaledLinear
    report = judged(chosen, model, WHICH)
    assert any("model.layers.1.mlp.up_proj: its product is" in line for line in report.problems)


@needs_vnni
def test_a_product_that_is_off_fails_its_audit(tmp_path, monkeypatch):
    chosen = cell(parts("int8-row", "int8-token", "real"))
    model = make(chosen, tmp_path, WHICH).model
    inner = real._int8
    monkeypatch.setattr(real, "_int8", lambda *of: inner(*of) * 1.02)
    problems = judged(chosen, model, WHICH).problems
    assert any("its product is 0.02 off" in line for line in problems)


@needs_vnni
def test_a_model_whose_rounding_is_paused_multiplies_whole_inputs(tmp_path):
    chosen = cell(parts("int8-row", "int8-static", "real"))
    model = make(chosen, tmp_path, WHICH).model
    weights = make(cell({"name": "int8-row"}), tmp_path, WHICH).model
    with chosen.weights_alone(model):
        assert torch.equal(logits(model, ids(3, 2, 40)), logits(weights, ids(3, 2, 40)))
    assert not torch.equal(logits(model, ids(3, 2, 40)), logits(weights, ids(3, 2, 40)))


@pytest.mark.parametrize("weights", ["int8-row", "fp8-row", "fp8-tensor"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_times_scales_are_weight_quantizers_on_their_own(weights, dtype, tmp_path):
    chosen = cell({"name": weights}, dtype=dtype)
    model = make(chosen, tmp_path, "llama-biases").model
    report = judged(chosen, model)
    assert report.problems == ()
    assert report.levels <= 256
    assert 8 <= report.bits_per_weight < 8.8
    assert damage(model, decoder("llama-biases", dtype=getattr(torch, dtype))) < 0.1
    assert calibration().samples == 8
