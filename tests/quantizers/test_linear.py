"""What a quantizer of weights must cover, however a model stores it, and what happens if not."""

import pytest
import torch
import transformers as T
from quantizer_models import PROBE, VOCABULARY, llama, make, settings

from qbench.errors import QuantizationError
from qbench.quantizers.audit.cell import audit
from qbench.quantizers.config import matching
from qbench.quantizers.linear import linears, matrices

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FEW = {"num_experts_per_tok": 2}
MODELS = {
    "mixtral": lambda: T.MixtralForCausalLM(T.MixtralConfig(**SHAPE, **FEW, num_local_experts=4)),
    "deepseek-v3": lambda: T.DeepseekV3ForCausalLM(
        T.DeepseekV3Config(
            **SHAPE,
            **FEW,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=32,
        )
    ),
}
DENSE = {
    "gpt2": lambda: T.GPT2LMHeadModel(
        T.GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=VOCABULARY, n_positions=64)
    ),
    "lfm2": lambda: T.Lfm2ForCausalLM(
        T.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"])
    ),
}


def tiny(name):
    torch.manual_seed(0)
    model = {**MODELS, **DENSE}[name]().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "experts" in name:  # left empty by their constructors
            parameter.normal_(std=0.02)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_experts_that_a_quantizer_does_not_reach_are_named_with_their_size(name, tmp_path):
    """As if they had been left out without saying so."""
    made = make(settings("rtn-4bit", ignore=("experts",)), tmp_path, model=tiny(name)).model
    report = audit(tiny(name), made, settings("rtn-4bit"), PROBE)
    experts = [m for m in matrices(tiny(name)).values() if ".experts." in m.name]
    assert len(experts) in (8, 16)  # two an expert; DeepSeek's first layer is dense
    assert {m.name for m in experts} <= set(report.left_out)
    weights = sum(m.weight.numel() for m in matrices(tiny(name)).values())
    left = sum(m.weight.numel() for m in experts)
    assert report.coverage == pytest.approx(1 - left / weights, abs=0.01)
    assert any("experts.0.gate_up_proj [" in problem for problem in report.problems)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("quantizer", "stated"), [("rtn-4bit", {}), ("gptq-4bit", {})])
def test_leaving_experts_out_has_to_be_said(name, quantizer, stated, tmp_path):
    spared = {"ignore": ("experts", "gate")}
    if name == "deepseek-v3":
        spared["group_size"] = 16
    chosen = settings(quantizer, **spared)
    report = audit(tiny(name), make(chosen, tmp_path, model=tiny(name)).model, chosen, PROBE)
    assert report.problems == ()
    assert any(name.endswith("experts.0.down_proj") for name in report.left_out)
    assert report.coverage < 0.75
    assert chosen.to_dict()["ignore"] == ["experts", "gate"]


@pytest.mark.parametrize("name", DENSE)
def test_models_without_experts_are_covered_as_they_are(name, tmp_path):
    chosen = settings("rtn-4bit")
    report = audit(tiny(name), make(chosen, tmp_path, model=tiny(name)).model, chosen, PROBE)
    assert report.problems == ()
    assert report.coverage > 0.99
    assert report.left_out == (("model.layers.0.conv.conv",) if name == "lfm2" else ())


def test_every_parameter_of_two_dimensions_is_a_matrix_but_embeddings_norms_and_head():
    model = tiny("mixtral")
    others = {"model.embed_tokens", "lm_head"}
    expected = {
        n.removesuffix(".weight") for n, p in model.named_parameters() if p.dim() == 2
    } - others
    experts = {
        f"{n.rpartition('.')[0]}.{expert}.{n.rpartition('.')[2]}"
        for n, p in model.named_parameters()
        for expert in range(4)
        if p.dim() == 3
    }
    assert len(experts) == 16
    assert set(matrices(model)) == expected | experts


def test_what_the_settings_ignore_stays_as_it_was(tmp_path):
    chosen = settings("rtn-4bit", ignore=("*.1.mlp.down_proj", "o_proj"))
    made = make(chosen, tmp_path).model
    report = audit(llama(), made, chosen, PROBE)
    names = [f"model.layers.{i}.self_attn.o_proj" for i in (0, 1)] + [
        "model.layers.1.mlp.down_proj"
    ]
    assert report.problems == ()
    assert sorted(report.left_out) == sorted(names)
    assert all(torch.equal(linears(llama())[n].weight, linears(made)[n].weight) for n in names)


def test_a_pattern_that_names_nothing_is_refused_with_what_there_is(tmp_path):
    with pytest.raises(QuantizationError) as raised:
        make(settings("rtn-4bit", ignore=("experts",)), tmp_path)
    assert "ignore: 'experts' matches no weight matrix" in str(raised.value)
    assert "gate_proj, up_proj, down_proj" in str(raised.value)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("experts", {"a.0.mlp.experts.up"}),
        ("mlp.experts", {"a.0.mlp.experts.up"}),
        ("expert", set()),
        ("a.0.o", {"a.0.o"}),
        ("*.o", {"a.0.o", "a.1.o"}),
        ("a.[1-9].*", {"a.1.o"}),
    ],
)
def test_patterns_are_parts_of_names_or_whole_names_with_wildcards(pattern, expected):
    assert matching(["a.0.mlp.experts.up", "a.0.o", "a.1.o"], (pattern,)) == expected
