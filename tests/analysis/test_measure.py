"""A pass over the bundled pair: the model computes what it computes, all of it is measured."""

import csv
import json
import re

import pytest
import torch
from loading import load_model
from published_copies import copy_of
from published_copies import original as as_llama
from small_recipe import DEMO, qbench, small_recipe
from tiny import tiny_model

from qbench.analysis.attention_weights import TOKENS, attention_maps
from qbench.analysis.measure import measure
from qbench.analysis.sensitivity import Baseline, Unit, exchanged
from qbench.attention.observed import attention_observed
from qbench.attention.transformers import set_attention
from qbench.checkpoints import find
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.errors import EvaluationError, RecipeError, UnavailableError
from qbench.quantizers.linear import linears
from qbench.quantizers.quantize import apply
from qbench.quantizers.registry import config_of
from qbench.store import Sensitivities


@pytest.fixture(scope="module", params=["softmax", "softpick"])
def pair(request):
    checkpoint = find(str(DEMO / request.param))
    model = load_model(checkpoint, dtype=torch.float32, device="cpu")
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (5, 80), generator=draw)
    return model, load_tokenizer(checkpoint), ids


def measured(model, tokenizer, ids, batch=2):
    names = list(linears(model))
    return measure(model, ids, tokenizer=tokenizer, linears=names, batch=batch)


def test_a_model_that_is_looked_into_computes_the_same_and_is_left_as_it_was(pair):
    model, _, ids = pair
    before, name = model(input_ids=ids).logits, model.config._attn_implementation
    seen = []
    with torch.no_grad(), attention_observed(model, lambda *result: seen.append(result)):
        inside = model(input_ids=ids).logits
    assert torch.equal(inside, before)
    assert len(seen) == model.config.num_hidden_layers
    assert model.config._attn_implementation == name
    count = len(seen)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert len(seen) == count


def test_every_layer_head_and_linear_layer_is_measured(pair):
    """Inputs that layers share like any other."""
    model, tokenizer, ids = pair
    result = measured(model, tokenizer, ids)
    assert [len(layer.heads) for layer in result.layers] == [4] * 4
    assert [one.name for one in result.inputs] == list(linears(model))
    assert result.inputs_left_out == ()
    given, block = [], model.model.layers[1]
    handle = block.self_attn.v_proj.register_forward_pre_hook(lambda _, x: given.append(x[0]))
    states = model(input_ids=ids, output_hidden_states=True)
    handle.remove()
    loss = torch.nn.functional.cross_entropy(
        states.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )
    assert result.perplexity == pytest.approx(loss.exp().item(), rel=1e-5)
    assert result.layers[0].hidden.maximum == pytest.approx(states.hidden_states[1].max().item())
    value, key, gate = (
        next(one for one in result.inputs if one.name == f"model.layers.1.{name}")
        for name in ("self_attn.v_proj", "self_attn.k_proj", "mlp.gate_proj")
    )
    assert value.rms == pytest.approx(given[0].square().mean().sqrt().item(), rel=1e-5)
    assert value.largest == pytest.approx(given[0].abs().max().item(), rel=1e-5)
    assert key.rms == value.rms != gate.rms


def ours(kind="llama"):
    model = tiny_model(kind)
    model.config.qbench_normalizer = "softmax"
    set_attention(model, normalizer="softmax")
    return model


def test_what_a_sliding_window_hides_is_no_zero_weight(pair):
    model = ours("ministral")
    result = measured(model, pair[1], torch.randint(0, 64, (2, 40)))
    assert result.zeros == 0.0
    assert result.mass == pytest.approx(1.0)
    # queries from 8 on do not see the first key: at most 8 of 40 queries weigh it
    assert max(head.sinks[0].attention for layer in result.layers for head in layer.heads) < 0.2


def test_a_model_with_other_attention_or_that_gives_no_numbers_is_refused(pair):
    with pytest.raises(UnavailableError, match="its attention is sdpa"):
        measured(tiny_model("llama"), pair[1], torch.zeros(1, 8, dtype=torch.long))
    model = ours()
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(EvaluationError, match="nan"):
        measured(model, pair[1], torch.randint(0, 64, (2, 40)))


def test_stretches_of_positions_are_measured(pair):
    model, tokenizer, _ = pair
    page = json.loads((DEMO / "data" / "demo_pages" / "test.jsonl").read_text().splitlines()[0])
    words = tokenizer.encode(page["page"], add_special_tokens=False)[:199]
    ids = torch.tensor([[tokenizer.bos_token_id, *words], [tokenizer.bos_token_id, *words]])
    result = measured(model, tokenizer, ids)
    assert [(one.first, one.last) for one in result.stretches] == [(0, 127), (128, 199)]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
    )
    assert result.stretches[0].loss == pytest.approx(losses[:, :127].mean().item(), rel=1e-5)
    assert result.stretches[1].loss == pytest.approx(losses[:, 127:].mean().item(), rel=1e-5)
    assert result.stretches[1].loss_stderr == pytest.approx(0, abs=1e-6)  # the same text twice
    mean = sum(one.mass * (one.last - one.first + 1) for one in result.stretches) / 200
    assert mean == pytest.approx(result.mass)


def test_keys_are_measured_as_a_quantized_cache_gives_them_back(pair):
    model, tokenizer, ids = pair
    checkpoint = find(str(DEMO / model.config.qbench_normalizer))
    coded = load_model(checkpoint, dtype=torch.float32, device="cpu")
    apply(coded, config_of({"kv": "int4-token"}, compute_dtype="float32"), {})
    whole, result = measured(model, tokenizer, ids), measured(coded, tokenizer, ids)
    assert result.perplexity != whole.perplexity
    # The first layer has the same queries: what differs comes from its keys.
    assert result.layers[0].heads[0].largest != whole.layers[0].heads[0].largest


# Attention maps: weights of chosen heads, as the definition has them.


def test_maps_are_lower_triangles_of_weights_on_three_kinds_of_text(pair):
    model, tokenizer, _ = pair
    prose = torch.randint(3, 400, (60,), generator=torch.Generator().manual_seed(0))
    result = attention_maps(model, tokenizer, prose, [(1, 3), (0, 0)])
    assert [(m.text, m.layer, m.head) for m in result] == [
        (text, *head) for text in ("prose", "code", "few-shot") for head in ((1, 3), (0, 0))
    ]
    for one in result:
        assert [len(row) for row in one.rows] == list(range(1, len(one.tokens) + 1))
        assert len(one.tokens) <= TOKENS
        sums = [sum(row) for row in one.rows]
        if model.config.qbench_normalizer == "softmax":
            assert sums == pytest.approx([1.0] * len(sums), abs=2e-3)
        else:
            assert all(total <= 1.001 for total in sums)


# One part of a model quantized at a time: what is measured, and what a run keeps of it.


OPTIONS = ("--device", "cpu", "--samples", 3, "--length", 48, "--sensitivity", "rtn-4bit")


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
@pytest.mark.usefixtures("own_cache")
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
    pattern = r"^1 cell on cpu: at most \d+ texts of \d+ tokens of .*, one linear layer at a time$"
    assert re.search(pattern, capfd.readouterr().err, re.MULTILINE)
    rows = csv.DictReader((out / "analysis" / "analyses.csv").read_text().splitlines())
    values = {row["measure"]: row["value"] for row in rows if row["analysis"] == "sensitivity"}
    assert float(values[f"{whole.units[3].name}.kl.value"]) == whole.units[3].kl.value


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache", "undrawn")
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


@pytest.mark.usefixtures("own_cache")
def test_a_copy_without_its_original_is_refused(tmp_path):
    copy = copy_of(as_llama(tmp_path / "llama"), "bnb-nf4", tmp_path / "copy")
    path = small_recipe(tmp_path, checkpoints={"base": str(copy)}, quantizers=["checkpoint"])
    options = ("--device", "cpu", "--only", "base/checkpoint", "--sensitivity", "checkpoint")
    with pytest.raises(RecipeError, match="a published copy is compared with its original"):
        qbench("analyze", path, "--out", tmp_path, *options)
