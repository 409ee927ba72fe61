"""A pass over the bundled pair: the model computes what it computes, all of it is measured."""

import json

import pytest
import torch
from loading import load_model
from small_recipe import DEMO
from tiny import tiny_model

from qbench.analysis.attention_weights import TOKENS, attention_maps
from qbench.analysis.measure import measure
from qbench.attention.observed import attention_observed
from qbench.attention.transformers import set_attention
from qbench.checkpoints import find
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.errors import EvaluationError, UnavailableError
from qbench.quantizers.linear import linears
from qbench.quantizers.quantize import apply
from qbench.quantizers.registry import config_of


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


def test_attention_that_is_not_ours_is_refused(pair):
    with pytest.raises(UnavailableError, match="its attention is sdpa"):
        measured(tiny_model("llama"), pair[1], torch.zeros(1, 8, dtype=torch.long))


def test_a_model_that_gives_no_numbers_is_refused(pair):
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
