"""Products in 8 bits beside their simulation; weights that a library hides in a linear layer."""

from typing import ClassVar, Literal

import pytest
import torch
from pydantic.dataclasses import dataclass
from quantizer_models import PROBE, llama, logits, make

from qbench.errors import QuantizationError, RecipeError
from qbench.quantizers import SETTINGS, Stored, WeightQuantizer, parse
from qbench.quantizers.activations.quantize import by_group
from qbench.quantizers.audit import audit
from qbench.quantizers.linears import Plain, linears
from qbench.quantizers.w8a8_layers import GRIDS, LowPrecisionLinear, code, tensors_of
from qbench.record import Part, Precision

LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("artifacts")


def chosen(kind, dtype="float32", **stated):
    return parse(f"w8a8-{kind}", {"compute_dtype": dtype, **stated})


@pytest.mark.parametrize(("kind", "arithmetic"), [
    ("int8", "real"), ("int8", "simulated"), ("fp8", "simulated")
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cells_pass_their_audit_and_say_what_ran(kind, arithmetic, dtype, folder):
    settings = chosen(kind, dtype, arithmetic=arithmetic)
    made = make(settings, folder)
    report = audit(llama(dtype=getattr(torch, dtype)), made.model, settings, PROBE)
    assert report.problems == ()
    assert report.coverage == 1
    assert len(report.activations.modules) == 14
    assert report.causality.moved == report.batch_mates.moved == 0
    assert settings.precision.name == "W8A8"
    assert settings.precision.activations.simulated is (arithmetic == "simulated")
    assert made.detail == f"{kind}, {arithmetic} products"


def test_the_simulation_gives_what_real_int8_products_give(folder):
    """But for the order of sums."""
    real, simulated = (
        logits(make(chosen("int8", arithmetic=a), folder).model) for a in ("real", "simulated")
    )
    apart = float((real - simulated).norm() / real.norm())
    assert apart < 2e-6
    assert float((real - logits(llama())).norm() / real.norm()) > 100 * apart


def test_in_bfloat16_the_simulation_rounds_what_it_multiplies_and_no_more():
    draw = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 96, generator=draw).bfloat16() for n in (64, 50))
    shape = Plain(in_features=96, out_features=64, bias=None, dtype=x.dtype, device=x.device)
    layer = LowPrecisionLinear(shape, tensors_of(weight, "int8"), "int8", fast=False)
    real, simulated = layer(code(x, "int8")), layer(by_group(x, GRIDS["int8"]))
    assert float((real - simulated).float().norm() / real.float().norm()) < 5e-3


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 17, 64])
def test_a_layer_multiplies_integers_exactly(rows, bias):
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(24, 40, generator=draw), torch.randn(2, rows, 40, generator=draw)
    offset = torch.randn(24, generator=draw) if bias else None
    shape = Plain(in_features=40, out_features=24, bias=offset, dtype=x.dtype, device=x.device)
    layer = LowPrecisionLinear(shape, tensors_of(weight, "int8"), "int8", fast=False)
    found = layer(code(x, "int8"))
    values = by_group(x, GRIDS["int8"]).double() @ by_group(weight, GRIDS["int8"]).double().T
    expected = values if offset is None else values + offset.double()
    assert found.shape == (2, rows, 24)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_codes_times_scales_are_the_simulated_values(kind):
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(0)) * 30
    x[2] = 0
    assert torch.equal(code(x, kind).dequantize(), by_group(x, GRIDS[kind]))
    x[4, 1] = torch.inf
    assert code(x, kind).dequantize()[4].isnan().all()
    assert code(x, kind).dequantize()[5].isfinite().all()


def test_a_product_that_is_not_that_of_its_codes_is_caught(folder, monkeypatch):
    settings = chosen("int8")
    model = make(settings, folder).model
    layer = model.get_submodule(LAYER)
    right = layer._int8
    layer._int8 = lambda rows, scale, dtype: right(rows, scale, dtype) * 1.001
    (problem,) = audit(llama(), model, settings, PROBE).problems
    assert problem.startswith(f"{LAYER}: its product is 0.001 off that of its quantized input")


REFUSED = [
    ("int8", {}, {"hidden_size": 100}, "cpu", "hidden_size is 100, and int8 products need "
     "multiples of 8; say arithmetic: simulated"),
    ("fp8", {}, {"hidden_size": 96, "intermediate_size": 168}, "cuda", "intermediate_size is 168"),
    ("fp8", {}, {"hidden_size": 96}, "cpu", "float8 products need a GPU; say arithmetic: sim"),
    ("fp8", {"compute_dtype": "float32"}, {"hidden_size": 96}, "cuda", "give bfloat16, not"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "stated", "config", "device", "message"), REFUSED)
def test_what_cannot_multiply_is_refused_before_work(kind, stated, config, device, message):
    settings = parse(f"w8a8-{kind}", stated)
    with pytest.raises(RecipeError, match=message):
        settings.check(config, device)
    parse(f"w8a8-{kind}", {**stated, "arithmetic": "simulated"}).check(config, device)


def test_a_layer_whose_width_does_not_fit_is_never_skipped_in_silence(folder):
    settings = parse("w8a8-int8", {"compute_dtype": "float32", "leave_out": ["gate_proj"]})
    message = "up_proj is 84 × 64, and int8 products need multiples of 8; say leave_out: .up_proj."
    with pytest.raises(QuantizationError, match=message):
        make(settings, folder, model=llama(intermediate=84))


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Torchao(WeightQuantizer):
    """int8 as torchao has it: the module stays an nn.Linear, its weight becomes a subclass."""

    method: ClassVar[str] = "torchao"
    title: ClassVar[str] = "torchao"
    measures_activations: ClassVar[bool] = False
    bits: Literal[8] = 8
    spared: ClassVar[str] = ""  # what the library leaves as it is without a word

    @property
    def scheme(self):
        return "int8 per row"

    @property
    def precision(self):
        part = Part(bits=8, scheme="int8 per row", simulated=False)
        return Precision(weights=part, activations=part)

    def shared_bits(self, rows, columns):
        return (32 + 8) / columns

    def agreement(self, dtype):
        return 1e-2, 5e-2

    def rebuild(self, shape, tensors):
        raise NotImplementedError

    def read(self, module):
        weight = getattr(module, "weight", None)
        if not hasattr(weight, "qdata"):
            return None
        parts = {"qdata": weight.qdata, "scale": weight.scale, "zero": weight.zero_point}
        return Stored(
            tensors=parts, dequantize=lambda: weight.dequantize(), groups=lambda values: values
        )


def in_torchao(skip=()):
    quantization = pytest.importorskip("torchao.quantization")
    model = llama()
    layers = [m for n, m in linears(model).items() if n not in skip]
    quantization.quantize_(
        model,
        quantization.Int8DynamicActivationInt8WeightConfig(),
        lambda module, _: any(module is layer for layer in layers),
    )
    return model


def test_a_tensor_subclass_inside_a_linear_layer_is_recognized():
    report = audit(llama(), in_torchao(), Torchao(compute_dtype="float32"), PROBE)
    assert report.problems == ()
    assert report.coverage == 1
    assert {module.kind for module in report.modules} == {"Linear"}
    assert all(8 <= module.bits_per_weight < 9 for module in report.modules)


def test_a_layer_that_a_library_skipped_in_silence_is_named():
    report = audit(llama(), in_torchao({LAYER}), Torchao(compute_dtype="float32"), PROBE)
    assert report.problems == (f"not quantized: {LAYER} [160, 64]",)


def test_a_tensor_subclass_is_no_unquantized_weight():
    problems = audit(llama(), in_torchao(), parse("fp32"), PROBE).problems
    assert f"{LAYER}: not a plain weight in float32" in problems
