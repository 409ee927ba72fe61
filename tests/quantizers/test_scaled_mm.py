"""Real products of codes by codes: held against simulated ones and torchao's; cells that have them
are decided when planned, audited, and equal to their simulation."""

from types import SimpleNamespace

import pytest
import torch
from quantizer_models import damage, ids, logits, needs_vnni
from test_treated_cells import judged, make
from torch import nn
from treated_models import decoder

from qbench.errors import QuantizationError, RecipeError
from qbench.quantizers import config_of, scaled_mm
from qbench.quantizers.activation_inputs import multiply_codes
from qbench.quantizers.fake_quant import FakeQuant, fake_quantize
from qbench.quantizers.formats import QuantFormat
from qbench.quantizers.names import QUANTIZERS
from qbench.quantizers.scaled_mm import ScaledLinear

INT8 = QuantFormat(num_bits=8)
WHICH = "llama-wide"  # widths are multiples of 16
CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96}


def draw(*shape, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[0] *= 1e-4
    return x


def linear(weights="int8-row", bias=True, columns=48, rows=80):
    torch.manual_seed(1)
    layer = nn.Linear(columns, rows, bias=bias).requires_grad_(False)
    settings = QUANTIZERS.parse(weights)
    return scaled_mm.from_packed(layer, scaled_mm.quantize("layer", layer, settings), settings)


def install(layer, form=INT8, name="layer"):
    multiply_codes(name, layer, FakeQuant(form, {name: None}))
    return layer


@needs_vnni
@pytest.mark.parametrize("strategy", ["token", "tensor"])
@pytest.mark.parametrize(
    ("shape", "bias"), [((2, 7, 48), True), ((1, 48), False), ((40, 48), True)]
)
def test_a_real_int8_product_is_the_simulated_one(shape, bias, strategy):
    """Within rounding of the float32 sums that the simulation takes; the real ones are exact."""
    x, form = draw(*shape), QuantFormat(num_bits=8, strategy=strategy)
    simulated = linear(bias=bias)
    found = install(linear(bias=bias), form)(x)
    torch.testing.assert_close(found, simulated(fake_quantize(x, form)), rtol=1e-5, atol=2e-6)
    assert not torch.equal(found, simulated(x))


def test_a_layer_without_codes_is_refused_by_name():
    with pytest.raises(QuantizationError, match="up_proj: Linear holds no int8 codes"):
        install(nn.Linear(16, 16), name="up_proj")


def cell(entry, device="cpu", dtype="float32", config=CONFIG):
    return resolved(entry, device, dtype, config)[0]


def resolved(entry, device="cpu", dtype="float32", config=CONFIG):
    entry = {"name": entry} if isinstance(entry, str) else entry
    return config_of(entry, compute_dtype=dtype).resolved(config, device)


def parts(weights, activations, arithmetic, **more):
    named = {"name": activations, "arithmetic": arithmetic}
    return {"weights": weights, "activations": named, **more}


@needs_vnni
@pytest.mark.parametrize(
    ("activations", "outliers"),
    [("int8-token", None), ("int8-static", "smoothquant"), ("int8-tensor", "rotation")],
)
def test_real_int8_on_a_cpu_passes_its_audit_and_equals_its_simulation(
    activations, outliers, tmp_path
):
    more = {} if outliers is None else {"outliers": outliers}
    found = {}
    for arithmetic in ("real", "simulated"):
        chosen = cell(parts("int8-row", activations, arithmetic, **more))
        model = make(chosen, tmp_path / arithmetic, WHICH)
        layers = [m for m in model.modules() if isinstance(m, ScaledLinear)]
        assert len(layers) == 14
        report = judged(chosen, model, WHICH)
        kind = {"real": "ScaledMM", "simulated": "ScaledLinear"}[arithmetic]
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
    monkeypatch.setattr("qbench.machine.cpu_flags", lambda: frozenset({"avx_vnni"}))
    chosen, line = resolved(entry, device, dtype, config)
    assert line == says
    assert chosen.to_dict()["activations"]["arithmetic"] == (
        "real" if says.endswith("real") else "simulated"
    )


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
    gpu = SimpleNamespace(capability=here)
    monkeypatch.setattr("qbench.machine.visible_gpus", lambda: [gpu])
    assert resolved("w8a8-fp8", "cuda", "bfloat16")[1] == f"fp8-row: arithmetic auto: {says}"


def test_real_that_cannot_be_is_refused_before_work():
    with pytest.raises(RecipeError) as raised:
        cell(parts("bnb-4bit", "int8-token", "real"))
    assert str(raised.value) == (
        "int8-token: arithmetic: real: it takes weights: int8-row, not bnb-4bit; set simulated "
        "or auto"
    )


@needs_vnni
def test_a_layer_that_stopped_multiplying_codes_fails_its_audit(tmp_path):
    """As where a library leaves a layer out in silence."""
    chosen = cell(parts("int8-row", "int8-token", "real"))
    model = make(chosen, tmp_path, WHICH)
    model.model.layers[1].mlp.up_proj.__class__ = ScaledLinear
    report = judged(chosen, model, WHICH)
    assert any("model.layers.1.mlp.up_proj: its product is" in line for line in report.problems)


@needs_vnni
def test_a_product_that_is_off_fails_its_audit(tmp_path, monkeypatch):
    chosen = cell(parts("int8-row", "int8-token", "real"))
    model = make(chosen, tmp_path, WHICH)
    inner = scaled_mm._int8
    monkeypatch.setattr(scaled_mm, "_int8", lambda *of: inner(*of) * 1.02)
    problems = judged(chosen, model, WHICH).problems
    assert any("its product is 0.02 off" in line for line in problems)


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [("int8-row", "float32"), ("fp8-row", "bfloat16"), ("fp8-tensor", "float32")],
)
def test_codes_times_scales_are_weight_quantizers_on_their_own(weights, dtype, tmp_path):
    chosen = cell({"name": weights}, dtype=dtype)
    model = make(chosen, tmp_path, "llama-biases")
    report = judged(chosen, model)
    assert report.problems == ()
    assert report.levels <= 256
    assert 8 <= report.bits_per_weight < 8.8
    assert damage(model, decoder("llama-biases", dtype=getattr(torch, dtype))) < 0.1
