"""One part of a model quantized at a time: what is measured, and what a run keeps of it."""

import csv
import re

import pytest
import torch
from loading import load_model
from published_copies import copy_of
from published_copies import original as as_llama
from small_recipe import DEMO, qbench, small_recipe

from qbench.analysis.sensitivity import Baseline, Unit, exchanged
from qbench.checkpoints import find
from qbench.errors import EvaluationError, RecipeError
from qbench.quantizers.linear import linears
from qbench.store import Sensitivities

OPTIONS = ("--device", "cpu", "--samples", 3, "--length", 48, "--sensitivity", "rtn-4bit")

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def models():
    """The softpick model, and one with each weight moved by a hundredth of its spread."""
    checkpoint = find(str(DEMO / "softpick"))
    original, changed = (
        load_model(checkpoint, dtype=torch.float32, device="cpu") for _ in range(2)
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in linears(changed).values():
            layer.weight += 0.1 * layer.weight.std() * torch.randn_like(layer.weight)
    return original, changed


def test_divergence_and_perplexity_are_those_of_whole_logits(models):
    original, changed = models
    ids = torch.randint(3, 400, (3, 20), generator=torch.Generator().manual_seed(1))
    name = "model.layers.2.mlp.down_proj"
    result = Baseline(original, ids, batch=2).against(
        Unit(name=name, layer=2, modules=(name,)), changed
    )
    with torch.no_grad():
        before = original(input_ids=ids).logits.double().log_softmax(-1)[:, :-1]
        with exchanged(original, {name: changed.get_submodule(name)}):
            after = original(input_ids=ids).logits.double().log_softmax(-1)[:, :-1]
    kl = (before.exp() * (before - after)).sum(-1).mean(1)
    assert result.kl.value == pytest.approx(kl.mean().item(), rel=1e-4)
    assert result.kl.stderr == pytest.approx((kl.std() / 3**0.5).item(), rel=1e-3)
    change = (before - after).gather(-1, ids[:, 1:, None])[..., 0].mean(1)
    assert result.ln_perplexity_ratio.value == pytest.approx(change.mean().item(), rel=1e-3)
    assert result.ln_perplexity_ratio.documents == 3


def test_the_model_is_left_as_it_was_and_without_a_change_nothing_is_lost(models):
    original, _ = models
    ids = torch.randint(3, 400, (2, 20))
    own = {name: original.get_submodule(name) for name in linears(original)}
    unit = Unit(name="all", layer=None, modules=tuple(own))
    result = Baseline(original, ids, batch=1).against(unit, original)
    assert result.kl.value == 0
    assert result.ln_perplexity_ratio.value == 0
    assert {name: original.get_submodule(name) for name in own} == own


def test_a_part_without_numbers_is_refused(models):
    original, _ = models
    checkpoint = find(str(DEMO / "softpick"))
    broken = load_model(checkpoint, dtype=torch.float32, device="cpu")
    name = "model.layers.0.mlp.up_proj"
    with torch.no_grad():
        broken.get_submodule(name).weight[0] = float("nan")
    base = Baseline(original, torch.randint(3, 400, (2, 20)), batch=2)
    with pytest.raises(EvaluationError, match="up_proj: if quantized, the model's logits"):
        base.against(Unit(name=name, layer=0, modules=(name,)), broken)


@pytest.mark.slow
def test_a_run_keeps_every_part_goes_on_where_it_stopped_and_shows_it(tmp_path, monkeypatch, capfd):
    path, out = small_recipe(tmp_path), tmp_path / "out"
    measured = []
    against = Baseline.against

    def stops(self, unit, quantized):
        measured.append(unit.name)
        if len(measured) == 5:
            raise MemoryError("stopped")
        return against(self, unit, quantized)

    monkeypatch.setattr("qbench.analysis.analyze_cell.SAVE_EVERY", -1.0)
    monkeypatch.setattr(Baseline, "against", stops)
    options = (*OPTIONS, "--only", "softpick/fp32")
    assert qbench("analyze", path, "--out", out, *options) == 1
    (stopped,) = Sensitivities(out).records()
    assert (stopped.status, len(stopped.units)) == ("failed", 4)
    assert qbench("analyze", path, "--out", out, *options) == 0
    assert len(measured) == 5 + 29 - 4  # the fifth again, and all after it
    (whole,) = Sensitivities(out).records()
    assert whole.units[:4] == stopped.units
    assert (whole.status, len(whole.units), whole.unit) == ("ok", 28, "linear")
    assert whole.together.kl.value > max(unit.kl.value for unit in whole.units) / 2
    capfd.readouterr()
    assert qbench("analyze", path, "--out", out, *options) == 0
    assert len(measured) == 30
    said = r"^1 cell on cpu: at most \d+ texts of \d+ tokens of .*, one linear layer at a time$"
    assert re.search(said, capfd.readouterr().err, re.MULTILINE)
    rows = csv.DictReader((out / "analysis" / "analyses.csv").read_text().splitlines())
    values = {row["measure"]: row["value"] for row in rows if row["analysis"] == "sensitivity"}
    assert float(values[f"{whole.units[3].name}.kl.value"]) == whole.units[3].kl.value


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_published_copys_layers_are_put_into_its_original(tmp_path):
    whole = as_llama(tmp_path / "llama")
    copy = copy_of(whole, "bnb-nf4", tmp_path / "copy")
    column = {"name": "checkpoint", "path": str(copy), "label": "copy"}
    path, out = small_recipe(tmp_path, checkpoints={"base": str(whole)}, compute_dtype="bfloat16",
                             quantizers=["bf16", column]), tmp_path / "out"  # fmt: skip
    options = ("--device", "cpu", "--samples", 3, "--length", 48, "--sensitivity", "copy")
    assert qbench("analyze", path, "--out", out, *options) == 0
    (result,) = Sensitivities(out).records()
    assert len(result.units) == 28
    assert all(0 < unit.kl.value < 0.01 for unit in result.units)
    assert max(unit.kl.value for unit in result.units) < result.together.kl.value < 0.02


def test_a_copy_without_its_original_is_refused(tmp_path):
    copy = copy_of(as_llama(tmp_path / "llama"), "bnb-nf4", tmp_path / "copy")
    path = small_recipe(tmp_path, checkpoints={"base": str(copy)}, quantizers=["checkpoint"])
    options = ("--device", "cpu", "--only", "base/checkpoint", "--sensitivity", "checkpoint")
    with pytest.raises(RecipeError, match="a published copy is compared with its original"):
        qbench("analyze", path, "--out", tmp_path, *options)
