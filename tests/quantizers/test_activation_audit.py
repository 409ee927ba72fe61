"""The audit of activations passes what is right and names what is not."""

import copy

import pytest
import torch
from quantizer_models import calibration, check, llama, make, parse

from qbench.errors import QuantizationError
from qbench.quantizers import activation_inputs, config_of, fake_quant
from qbench.quantizers.audit.activations import Rounding
from qbench.quantizers.config import ActivationEvidence, QuantizationConfig, settings
from qbench.quantizers.formats import QuantFormat
from qbench.quantizers.methods.input_formats import RoundedInputs

LAYER = "model.layers.1.mlp.up_proj"
DYNAMIC = ("int8-token", "int4-token-asymmetric", "fp8-row", "mxfp4")
STATIC = ("int8-static-asymmetric", "fp8-static", "nvfp4")
MIXING = ("int8-tensor", "int6-tensor-asymmetric")


def of(activations, weights="fp32", dtype="float32"):
    return config_of({"weights": weights, "activations": activations}, compute_dtype=dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("artifacts")


CASES = [(name, "float32") for name in DYNAMIC + STATIC + MIXING]


@pytest.mark.parametrize(("name", "dtype"), [*CASES, ("int8-static", "bfloat16")])
def test_every_scheme_passes(name, dtype, folder):
    chosen = of(name, {"float32": "fp32", "bfloat16": "bf16"}[dtype], dtype)
    report = check(make(chosen, folder), chosen)
    measured = report.activations
    assert report.problems == ()
    assert len(measured.modules) == 14
    assert measured.levels <= 2**measured.bits
    assert 0 < measured.error < 0.2
    assert report.treatment_error is None
    assert report.causality.declared is report.batch_mates.declared is (name in MIXING)
    if name not in MIXING:
        assert report.causality.moved == report.batch_mates.moved == 0
    else:
        assert report.batch_mates.moved > report.batch_mates.tolerance


@pytest.mark.parametrize("name", ["int8-token", "int4-token-asymmetric", "mxfp4", "int8-tensor"])
def test_inputs_of_zeros_pass(name, folder):
    """As in blocks that an expansion has added, whose output matrices are zeros."""
    chosen, model = of(name), llama()
    for layer in ("self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"):
        model.get_submodule(f"model.layers.0.{layer}").weight.data.zero_()
    report = check(make(chosen, folder, model=copy.deepcopy(model)), chosen, model)
    assert report.problems == ()


@pytest.mark.parametrize("name", ["int8-token", "fp8-row", "int8-tensor"])
def test_a_call_without_values_is_no_measurement(name):
    """As of an expert that no token of the text is sent to."""
    evidence = ActivationEvidence(format=of(name).activations.format, fixed=None)
    rounding = Rounding(evidence, "values")
    rounding.add(torch.empty(0, 64), torch.empty(0, 64))
    assert (rounding.count, rounding.levels, rounding.problems) == (0, 0, [])


def test_a_hook_that_is_gone_is_caught_by_what_the_product_takes_in(folder):
    chosen = of("int4-token")
    model = make(chosen, folder)
    model.get_submodule(LAYER)._forward_pre_hooks.clear()
    problems = check(model, chosen).problems
    assert [line.split(": ")[0] for line in problems] == [LAYER, LAYER]
    assert "% of its input's values differ from their rounding to int4" in problems[0]
    assert "levels under one scale of its input, 4 bits have 16" in problems[1]


@pytest.mark.parametrize(
    ("made", "wrong", "words"),
    [
        *(("int8-token", wrong, "differ from their rounding to int8") for wrong in (
            lambda x, largest: torch.round(x * 128 / largest).clamp(-127, 127) * largest / 128,
            lambda x, _: fake_quant.fake_quantize_rows(x, QuantFormat(num_bits=7)),
            lambda x, largest: torch.trunc(x * 127 / largest) * largest / 127)),
        ("int6-token", None, "its input is rounded to 6 bits, the settings say 8"),
    ],
)  # fmt: skip
def test_rounding_that_is_a_little_wrong_or_to_fewer_bits_is_caught(
    made, wrong, words, folder, monkeypatch
):
    model = make(of(made), folder)
    if wrong is not None:
        monkeypatch.setattr(
            fake_quant, "fake_quantize", lambda x, *_: wrong(x, x.abs().amax(-1, keepdim=True))
        )
    problems = check(model, of("int8-token")).problems
    assert len([line for line in problems if words in line]) == 14


@settings
class Undeclared(RoundedInputs):
    """Says nothing of what its scale sees."""

    batch_invariant = True


def test_a_scale_that_sees_more_than_it_declares_fails_the_cell(folder, monkeypatch):
    monkeypatch.setattr(Undeclared, "__module__", RoundedInputs.__module__)
    chosen = QuantizationConfig(
        activations=Undeclared(element="int8", per="tensor"), dtype="float32"
    )
    report = check(make(chosen, folder), chosen)
    future, mates = report.problems
    assert future.startswith("a change of later tokens moves earlier logits by 0.0")
    assert "do not declare that tokens see the future" in future
    assert mates.startswith("a change of the rest of a batch moves a row's logits by 0.")
    assert "do not declare that scores depend on the batch" in mates
    assert report.causality.moved > 100 * report.causality.tolerance


@pytest.mark.parametrize(
    ("leak", "words"),
    [("for layer in layers: layer.self_attn.is_causal = False",
      "a change of later tokens moves earlier logits"),
     ("layers[0].mlp.register_forward_hook(lambda _, x, output: output + output.flip(0))",
      "a change of the rest of a batch moves a row's logits")],
)  # fmt: skip
def test_a_token_that_sees_later_ones_or_other_rows_fails_the_cell(leak, words):
    model = llama()
    exec(leak, {"layers": model.model.layers})
    (problem,) = [line for line in check(model, parse("fp32")).problems if "a change of" in line]
    assert problem.startswith(words)


def test_clipping_is_measured(folder):
    chosen = of("int8-static")
    model = make(chosen, folder)
    assert check(model, chosen).activations.clipped < 0.01
    for name, scale in model.qbench_inputs.scales.items():
        model.qbench_inputs.scales[name] = type(scale)(scale.scale / 4)
    assert check(model, chosen).activations.clipped > 0.05


def test_groups_that_do_not_divide_a_layer_are_for_the_others_where_it_is_left_out(folder):
    options = {"name": "int8-token", "group_size": 64}
    with pytest.raises(QuantizationError, match=r"groups of 64 .*down_proj \(160\)"):
        make(of(options), folder)
    chosen = of({**options, "ignore": ["down_proj"]})
    assert check(make(chosen, folder), chosen).problems == ()


def test_static_ranges_are_those_of_the_calibration_text(folder):
    chosen = of("int8-static")
    model = make(chosen, folder)
    seen = []
    original = llama()
    original.get_submodule(LAYER).register_forward_pre_hook(lambda _, a: seen.append(a[0]))
    original(calibration().ids, use_cache=False)
    largest = float(torch.cat(seen).abs().max())
    assert float(model.qbench_inputs.scales[LAYER].scale) == pytest.approx(
        largest / 127.5, rel=1e-4
    )


def test_inputs_that_overflow_on_calibration_text_are_named():
    model, chosen = llama(), of("int8-static").activations
    with torch.no_grad():
        model.get_submodule(LAYER).weight.fill_(3e38)  # finite, as weights must be
    with pytest.raises(QuantizationError, match="down_proj: its inputs on calibration"):
        activation_inputs.calibrate(model, chosen, calibration(), lambda what, done: None)
