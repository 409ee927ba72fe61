"""torchao leaves an ``nn.Linear`` whose weight is a tensor subclass: the audit is not fooled by the
class, and finds layers that the library left out in silence."""

import dataclasses

import pytest
import torch
from pydantic.dataclasses import dataclass
from qbench.quantizers.quantization import quantize
from quantizer_models import DIGEST, PROBE, llama, needs_vnni
from torch import nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    quantize_,
)
from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor
from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

from qbench.quantizers import SETTINGS, Made, Stored, WeightQuantizer, parse
from qbench.quantizers.audit import audit
from qbench.records import Part, Precision

CONFIGS = {
    "int8": Int8DynamicActivationInt8WeightConfig(set_inductor_config=False),
    "fp8": Float8WeightOnlyConfig(set_inductor_config=False),
}


def body(module, name):
    return isinstance(module, nn.Linear) and "lm_head" not in name


def quantized(kind, chosen=body):
    model = llama()
    quantize_(model, CONFIGS[kind], filter_fn=chosen)
    return model


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Torchao(WeightQuantizer):
    """What a plug-in over the library would be; it leaves layers out, as the library does."""

    method = "torchao"
    title = "torchao"
    kind: str
    skips: str = ""
    bits: int = 8

    @property
    def precision(self):
        activations = Part(bits=8, scheme="int8 per token") if self.kind == "int8" else None
        return Precision(weights=Part(bits=8, scheme=self.scheme), activations=activations)

    @property
    def scheme(self):
        return f"{self.kind} per row"

    def shared_bits(self, rows, columns):
        return (32 + 8) / columns

    def agreement(self, dtype):
        """The identity's ones are 127 of 127.5 steps."""
        return 5e-3, 5e-2

    def make(self, model, calibration, progress):
        return Made(tensors={}, note="torchao")

    def apply(self, model, tensors):
        quantize_(
            model,
            CONFIGS[self.kind],
            filter_fn=lambda m, n: body(m, n) and not (self.skips and self.skips in n),
        )
        return model

    def rebuild(self, shape, tensors):
        raise NotImplementedError

    def read(self, module):
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Int8Tensor | Float8Tensor):
            return None
        return Stored(
            tensors={"qdata": weight.qdata, "scale": weight.scale},
            dequantize=weight.dequantize,
            groups=lambda matrix: matrix,
        )


def made(chosen, folder):
    return quantize(llama(), chosen, calibration=None, digest=DIGEST, artifacts=folder).model


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_that_torchao_quantized_does_not_pass_for_an_unquantized_one(kind):
    model = quantized(kind)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    report = audit(llama(), model, parse("fp32"), PROBE)
    assert len([line for line in report.problems if "not a plain weight in float32" in line]) == 14


@needs_vnni
@pytest.mark.parametrize("kind", CONFIGS)
def test_its_layers_are_measured_as_quantized(kind, tmp_path):
    chosen = Torchao(kind=kind, compute_dtype="float32")
    report = audit(llama(), made(chosen, tmp_path), chosen, PROBE)
    assert report.problems == ()
    assert report.coverage == 1.0
    assert {module.kind for module in report.modules} == {"Linear"}
    assert 8 < report.bits_per_weight < 8.7


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_layer_that_the_library_left_out_in_silence_is_found(kind, tmp_path):
    chosen = Torchao(kind=kind, skips="layers.1.mlp.down_proj", compute_dtype="float32")
    report = audit(llama(), made(chosen, tmp_path), chosen, PROBE)
    assert "not quantized: model.layers.1.mlp.down_proj [64, 160]" in report.problems
    assert report.left_out == ("model.layers.1.mlp.down_proj",)


def test_broken_codes_are_seen_through_the_subclass(tmp_path):
    chosen = Torchao(kind="int8", compute_dtype="float32")
    model = made(chosen, tmp_path)
    model.model.layers[0].self_attn.o_proj.weight.scale.mul_(torch.nan)
    report = audit(llama(), model, chosen, PROBE)
    assert not report.passed
    assert any("o_proj" in line and "not finite" in line for line in report.problems)


def test_the_settings_of_the_plug_in_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Torchao(kind="int8").kind = "fp8"
