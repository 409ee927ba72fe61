"""One file outside the package is enough for a new quantizer, and what the audit makes of modules
that it has never seen."""

import json
import sys
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import torch
from plugins import toy_quantizer  # it registers sign-1bit
from pydantic.dataclasses import dataclass
from quantizer_models import PROBE, llama, make
from torch import Tensor, nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    quantize_,
)

from qbench.errors import RecipeError
from qbench.quantizers import (
    QUANTIZERS,
    SETTINGS,
    PackedWeight,
    QuantizationConfig,
    WeightSettings,
    parse,
    register,
)
from qbench.quantizers.artifacts import Artifact
from qbench.quantizers.audit.cell import audit
from qbench.quantizers.linear import linears
from qbench.recipe_schema import explain


def test_its_settings_are_checked_keyed_and_explained():
    chosen = parse("sign-1bit", {"gain": 1})
    assert json.loads(json.dumps(chosen.to_dict())) == chosen.to_dict()
    assert (chosen.to_dict()["gain"], chosen.title) == (1.0, "Signs")
    assert "a number between 0 and 2" in explain(QUANTIZERS.get("sign-1bit"), "gain")
    with pytest.raises(RecipeError, match="gain must be less than 2, not 7"):
        parse("sign-1bit", {"gain": 7})
    with pytest.raises(RecipeError, match="sign has no 2-bit; it has 1"):
        parse("sign-2bit", {})


def test_its_own_file_is_part_of_its_key(tmp_path, monkeypatch):
    """The digest of qbench's modules does not know of it."""
    chosen = parse("sign-1bit")

    def key():
        return Artifact(
            tmp_path,
            original="0" * 64,
            config=chosen,
            calibration=None,
            attention="none",
            normalizer_source=None,
            device=torch.device("cpu"),
        ).key

    before, changed = key(), tmp_path / "changed.py"
    changed.write_text(Path(toy_quantizer.__file__).read_text() + "# changed\n")
    monkeypatch.setattr(toy_quantizer, "__file__", str(changed))
    assert key() != before
    assert "source" not in parse("rtn-4bit").to_dict()


class Halved(Tensor):
    """A weight of four bits behind the face of a float tensor, as torchao's are."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Tensor:
        wrapped = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)
        wrapped.codes, wrapped.scale = codes, scale
        return wrapped

    def dequantize(self) -> Tensor:
        return (self.codes.to(self.scale.dtype) - 8) * self.scale

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return Halved(args[0].codes, args[0].scale)
        plain = [a.dequantize() if isinstance(a, Halved) else a for a in args]
        return function(*plain, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Subclassed(WeightSettings):
    """Layers stay ``nn.Linear``; their weights become tensors of another class, as torchao's."""

    method: ClassVar[str] = "subclassed"
    title: ClassVar[str] = "Subclassed"
    num_bits: Literal[4] = 4

    @property
    def scheme(self) -> str:
        return "int4 per row"

    def shared_bits(self, rows, columns):
        return 4 + 32 / columns  # a byte holds one code


def quantize(name, layer, settings):
    scale = layer.weight.abs().amax(1, keepdim=True) / 7
    return {"codes": (layer.weight / scale).round().add(8).to(torch.uint8), "scale": scale}


def from_packed(shape, tensors, settings):
    layer = nn.Linear(shape.in_features, shape.out_features, bias=False, device="meta")
    layer.weight = nn.Parameter(Halved(**tensors), requires_grad=False)
    layer.bias = shape.bias
    return layer


def unpack(module, settings):
    if not isinstance(getattr(module, "weight", None), Halved):
        return None
    weight = module.weight
    return PackedWeight(
        tensors={"codes": weight.codes, "scale": weight.scale},
        dequantize=weight.dequantize,
        groups=lambda weight: weight,
    )


if "subclassed-4bit" not in QUANTIZERS:
    register("subclassed-4bit", Subclassed, "for this test")
CHOSEN = QuantizationConfig(weights=Subclassed(compute_dtype="float32"))
LAYER = "model.layers.1.mlp.up_proj"


def test_a_tensor_subclass_inside_a_linear_layer_counts_as_quantized(tmp_path):
    chosen = CHOSEN
    model = make(chosen, tmp_path)
    assert {type(layer) for layer in linears(model).values()} == {nn.Linear}
    report = audit(llama(), model, chosen, PROBE)
    assert report.problems == ()
    assert (report.coverage, {m.kind for m in report.modules}) == (1.0, {"Linear"})
    assert report.levels <= 16
    assert audit(llama(), model, parse("fp32"), PROBE).problems  # and never as unquantized


def test_evidence_of_nothing_covers_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "unpack", lambda *_: None)
    report = audit(llama(), make(CHOSEN, tmp_path), CHOSEN, PROBE)
    assert (report.passed, report.coverage, len(report.left_out)) == (False, 0.0, 14)


@pytest.mark.parametrize("config", [Int8DynamicActivationInt8WeightConfig, Float8WeightOnlyConfig])
def test_a_model_that_torchao_quantized_does_not_pass_for_an_unquantized_one(config):
    model = llama()
    body = lambda module, name: isinstance(module, nn.Linear) and "lm_head" not in name  # noqa: E731
    quantize_(model, config(set_inductor_config=False), filter_fn=body)
    report = audit(llama(), model, parse("fp32"), PROBE)
    assert len([line for line in report.problems if "not a plain weight in float32" in line]) == 14
