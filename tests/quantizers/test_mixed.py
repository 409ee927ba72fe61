"""Weights whose settings differ between layers."""

import copy

import pytest
import torch
from quantizer_models import VOCABULARY, check, make, settings
from tiny import tiny_model

from qbench.errors import QuantizationError, RecipeError
from qbench.quantizers import config_of


def mixed(**layers):
    return config_of({"name": "mixed", "layers": layers, "compute_dtype": "float32"})


def weights(model):
    return {n: m(torch.eye(m.in_features)).T for n, m in model.named_modules()
            if hasattr(m, "in_features") and n != "lm_head"}  # fmt: skip


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_each_layer_is_quantized_and_audited_by_the_first_pattern_that_matches(method, tmp_path):
    layers = {"*.down_proj": f"{method}-8bit:group_size=32", "*": "rtn-4bit:group_size=32"}
    chosen = mixed(**layers)
    model = make(chosen, tmp_path)
    report = check(model, chosen)
    assert report.problems == ()
    assert {m.name.split(".")[-1] for m in report.modules if m.levels > 16} == {"down_proj"}
    alone = {text: weights(make(config_of({"name": text, "compute_dtype": "float32"}), tmp_path))
             for text in layers.values() if text.startswith("rtn")}  # fmt: skip
    for name, weight in weights(model).items():
        expected = alone.get(layers["*.down_proj" if name.endswith("down_proj") else "*"])
        assert expected is None or torch.equal(weight, expected[name])


def test_gptq_of_two_widths_shares_a_hessian_and_each_width_is_audited(tmp_path):
    chosen = mixed(**{"*.q_proj": "gptq-8bit:group_size=32", "*": "gptq-3bit:group_size=32"})
    report = check(make(chosen, tmp_path), chosen)
    assert report.problems == ()
    levels = {module.name.split(".")[-1]: module.levels for module in report.modules}
    assert levels["q_proj"] > 8 >= levels["k_proj"]
    same = mixed(**{"*.q_proj": "gptq-3bit:group_size=32", "*": "gptq-3bit:group_size=32"})
    plain = settings("gptq-3bit")
    pair = [weights(make(each, tmp_path)) for each in (same, plain)]
    assert all(torch.equal(pair[0][name], pair[1][name]) for name in pair[1])


def test_a_layer_that_is_quantized_by_another_pattern_s_settings_fails_the_audit(tmp_path):
    eight, four = "rtn-8bit:group_size=32", "rtn-4bit:group_size=32"
    model = make(mixed(**{"*.down_proj": eight, "*": four}), tmp_path)
    problems = check(model, mixed(**{"*.up_proj": eight, "*": four})).problems
    assert any("down_proj: " in line and "4 bits have 16" in line for line in problems)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({"*": "kv4"}, "applies to weights alone"),
        ({"*": "bf16"}, "applies to weights alone"),
        ({"*": "gptq-5bit"}, "gptq has no 5-bit"),
        ({"a b": "rtn-4bit"}, "{pattern: quantizer}.*, each key a part of names.*see a b"),
        ("x", "layers must be {pattern: quantizer}"),
        ({"lm_head": "gptq-4bit", "*": "rtn-4bit"}, "lm_head: gptq-4bit cannot quantize LM"),
        ({"model.embed_tokens": "gptq-4bit"}, "embed_tokens: gptq-4bit cannot quantize LM"),
        ({}, r"mixed: layers: write \{pattern: quantizer\}"),
    ],
)
def test_what_is_no_map_to_quantizers_of_weights_is_refused_when_planned(layers, words):
    with pytest.raises(RecipeError, match=words):
        config_of({"name": "mixed", "layers": layers}).weights.check({}, "cpu")


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({"*.down_proj": "rtn-4bit"}, "no pattern matches the layers .*add a pattern '\\*'"),
        ({"gone": "rtn-8bit", "*": "rtn-4bit"}, "'gone' matches no linear layer"),
    ],
)
def test_patterns_that_leave_layers_out_or_match_none_are_refused(layers, words, tmp_path):
    with pytest.raises(QuantizationError, match=words):
        make(mixed(**layers), tmp_path)


NAMED = {"lm_head": "rtn-4bit:group_size=32", "model.embed_tokens": "hqq-3bit:group_size=32",
         "model.layers.*": "rtn-4bit:group_size=32"}  # fmt: skip
TIED = {name: quantizer for name, quantizer in NAMED.items() if "embed" not in name}


def with_ends(kind, layers, folder):
    """Return a model of ``kind`` and its copy with LM head and embeddings quantized."""
    original, chosen = tiny_model(kind, vocab_size=VOCABULARY).eval(), mixed(**layers)
    return original, make(chosen, folder, model=copy.deepcopy(original)), chosen


@pytest.mark.parametrize(
    ("kind", "layers"),
    [("llama", NAMED), ("gemma3_text", TIED), ("llama", {**NAMED, "lm_head": None})],
)
def test_named_head_and_embeddings_are_quantized_audited_and_counted_once(kind, layers, tmp_path):
    layers = {name: quantizer for name, quantizer in layers.items() if quantizer}
    original, model, chosen = with_ends(kind, layers, tmp_path)
    model.tie_weights()  # as lm-eval does
    report = check(model, chosen, original)
    assert report.problems == ()
    named = [name for name in layers if "*" not in name]
    assert {m.name for m in report.modules} >= set(named)
    head, table = original.get_output_embeddings(), original.get_input_embeddings()
    stored = {m.name: m.bits_per_weight * m.parameters for m in report.modules}
    left = sum(8.0 * p.nbytes for p in original.parameters() if p.dim() == 1)
    left += 0 if "lm_head" in named else 8.0 * head.weight.nbytes
    assert report.size.gib * 2**33 == pytest.approx(left + sum(stored.values()))
    assert (report.size.head_bits_per_weight < 5) == ("lm_head" in named)
    ids = torch.arange(VOCABULARY)[None]
    looked_up = model.get_input_embeddings()(ids)
    assert not torch.equal(looked_up, table(ids))
    if head.weight is table.weight:
        scale = float(table(ids).norm() / table.weight.norm())
        assert torch.allclose(looked_up[0], scale * model.lm_head.dequantize(), rtol=1e-5)


def test_embeddings_that_look_up_other_weights_than_their_layer_s_fail_the_audit(tmp_path):
    original, model, chosen = with_ends("llama", NAMED, tmp_path)
    table = model.get_input_embeddings()
    other = torch.nn.Embedding(*table.weight.shape)
    table.forward = other.forward
    problems = check(model, chosen, original).problems
    assert any("its embeddings: not looked up in the weight" in line for line in problems)
    model.set_submodule("model.embed_tokens", original.get_input_embeddings())
    problems = check(model, chosen, original).problems
    assert any("not quantized: model.embed_tokens" in line for line in problems)
