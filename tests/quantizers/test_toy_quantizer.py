"""One file outside the package is enough for a new quantizer, and what the audit makes of modules
that it has never seen."""

import json
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import torch
from plugins import toy_quantizer  # it registers sign-1bit
from pydantic.dataclasses import dataclass
from qbench.quantizers.linears import linears
from quantizer_models import PROBE, llama, logits, make
from torch import Tensor, nn

from qbench.errors import RecipeError
from qbench.quantizers import (
    QUANTIZERS,
    SETTINGS,
    Evidence,
    Made,
    Quantizer,
    Stored,
    WeightQuantizer,
    parse,
)
from qbench.quantizers.artifacts import artifact
from qbench.quantizers.audit import audit
from qbench.records import Part, Precision


def test_a_toy_quantizer_is_quantized_audited_and_reused(tmp_path):
    chosen = parse("sign-1bit", {"compute_dtype": "float32"})
    made = make(chosen, tmp_path)
    report = audit(llama(), made.model, chosen, PROBE)
    assert report.problems == ()
    assert (report.coverage, report.bits, report.levels) == (1.0, 1, 2)
    assert 1 < report.bits_per_weight < 1.3
    assert 0.55 < report.weight_error < 0.7  # √(1 − 2/π) = 0.60
    assert chosen.precision.name == "W1A16"
    again = make(chosen, tmp_path)
    assert "reused" in again.detail
    assert torch.equal(logits(made.model), logits(again.model))


def test_its_settings_are_checked_keyed_and_explained():
    chosen = parse("sign-1bit", {"gain": 1})
    assert json.loads(json.dumps(chosen.settings)) == chosen.settings
    assert (chosen.settings["gain"], chosen.title) == (1.0, "Signs")
    assert "a number between 0 and 2" in QUANTIZERS.get("sign-1bit").explain("gain")
    with pytest.raises(RecipeError, match="gain must be a number between 0 and 2, not 7"):
        parse("sign-1bit", {"gain": 7})
    with pytest.raises(RecipeError, match="sign has no 2-bit; it has 1"):
        parse("sign-2bit", {})


def test_its_own_file_is_part_of_its_key(tmp_path, monkeypatch):
    """The digest of qbench's modules does not know of it."""
    chosen = parse("sign-1bit")

    def key():
        return artifact(
            tmp_path,
            digest="0" * 64,
            quantizer=chosen,
            calibration=None,
            attention="none",
            device=torch.device("cpu"),
        ).key

    before, changed = key(), tmp_path / "changed.py"
    changed.write_text(Path(toy_quantizer.__file__).read_text() + "# changed\n")
    monkeypatch.setattr(toy_quantizer, "__file__", str(changed))
    assert key() != before
    assert "source" not in parse("rtn-4bit").settings


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
class Subclassed(WeightQuantizer):
    """Layers stay ``nn.Linear``; their weights become tensors of another class."""

    method: ClassVar[str] = "subclassed"
    title: ClassVar[str] = "Subclassed"
    bits: Literal[4] = 4

    @property
    def scheme(self) -> str:
        return "int4 per row"

    def shared_bits(self, rows, columns):
        return 4 + 32 / columns  # a byte holds one code

    def store(self, name, layer):
        scale = layer.weight.abs().amax(1, keepdim=True) / 7
        return {"codes": (layer.weight / scale).round().add(8).to(torch.uint8), "scale": scale}

    def rebuild(self, shape, tensors):
        layer = nn.Linear(shape.in_features, shape.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(Halved(**tensors), requires_grad=False)
        layer.bias = shape.bias
        return layer

    def read(self, module):
        if not isinstance(getattr(module, "weight", None), Halved):
            return None
        weight = module.weight
        return Stored(
            tensors={"codes": weight.codes, "scale": weight.scale},
            dequantize=weight.dequantize,
            groups=lambda weight: weight,
        )


LAYER = "model.layers.1.mlp.up_proj"


def test_a_tensor_subclass_inside_a_linear_layer_counts_as_quantized(tmp_path):
    chosen = Subclassed(compute_dtype="float32")
    model = make(chosen, tmp_path).model
    assert {type(layer) for layer in linears(model).values()} == {nn.Linear}
    report = audit(llama(), model, chosen, PROBE)
    assert report.problems == ()
    assert (report.coverage, {m.kind for m in report.modules}) == (1.0, {"Linear"})
    assert report.levels <= 16
    assert audit(llama(), model, parse("fp32"), PROBE).problems  # and never as unquantized


def test_a_layer_that_a_library_skipped_in_silence_is_found(tmp_path):
    chosen = Subclassed(compute_dtype="float32")
    model = make(chosen, tmp_path).model
    model.set_submodule(LAYER, linears(llama())[LAYER])
    report = audit(llama(), model, chosen, PROBE)
    assert f"not quantized: {LAYER} [160, 64]" in report.problems
    assert report.left_out == (LAYER,)


def test_evidence_of_nothing_covers_nothing(tmp_path, monkeypatch):
    chosen = Subclassed(compute_dtype="float32")
    monkeypatch.setattr(Subclassed, "evidence", lambda *_: Evidence())
    report = audit(llama(), make(chosen, tmp_path).model, chosen, PROBE)
    assert (report.passed, report.coverage, len(report.left_out)) == (False, 0.0, 14)


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Activations(Quantizer):
    """Rounds what layers receive, and stores another norm: no weight of a linear layer changes."""

    method: ClassVar[str] = "activations"
    title: ClassVar[str] = "Activations"
    threads: ClassVar[int] = 1
    leave_out: ClassVar[tuple[str, ...]] = ()
    compute_dtype: str = "float32"
    bits: int = 8
    really: bool = True

    @property
    def name(self):
        return f"int{self.bits}-token"

    @property
    def precision(self):
        return Precision(activations=Part(bits=self.bits, scheme="int8 per token"))

    def make(self, model, calibration, progress):
        return Made(tensors={"model.norm.weight": model.model.norm.weight * 1}, note="rounded")

    def apply(self, model, tensors):
        for name, tensor in tensors.items():
            model.get_parameter(name).data = tensor

        def round_input(_, arguments):
            scale = arguments[0].abs().amax(-1, keepdim=True) / (2 ** (self.bits - 1) - 1)
            return ((arguments[0] / scale).round() * scale,)

        for layer in linears(model).values() if self.really else ():
            layer.register_forward_pre_hook(round_input)
        return model

    def evidence(self, model):
        return Evidence()


@pytest.mark.parametrize("really", [True, False])
def test_a_quantizer_of_activations_alone_is_a_quantized_cell(really, tmp_path):
    chosen = Activations(really=really)
    assert (chosen.precision.quantized, chosen.precision.name) == (True, "W16A8")
    report = audit(llama(), make(chosen, tmp_path).model, chosen, PROBE)
    assert report.problems == (() if really else ("the logits are those of the unquantized model",))
    assert make(chosen, tmp_path).detail == "artifact reused: rounded"
