"""What a quantizer of weights must cover, however a model stores it, and what happens if not."""

import pytest
import torch
from quantizer_models import check, llama, make, settings
from tiny import tiny_model

from qbench.errors import QuantizationError
from qbench.quantizers.config import matching
from qbench.quantizers.linear import linears, matrices


def test_experts_that_a_quantizer_does_not_reach_are_named_with_their_size(tmp_path):
    """As if they had been left out without saying so."""
    chosen, original = settings("rtn-4bit", ignore=("experts",)), tiny_model("mixtral")
    made = make(chosen, tmp_path, model=tiny_model("mixtral"))
    report = check(made, settings("rtn-4bit"), original)
    experts = [m for m in matrices(original).values() if ".experts." in m.name]
    assert len(experts) == 8  # two an expert
    assert {m.name for m in experts} <= set(report.left_out)
    weights = sum(m.weight.numel() for m in matrices(original).values())
    left = sum(m.weight.numel() for m in experts)
    assert report.coverage == pytest.approx(1 - left / weights, abs=0.01)
    assert any("experts.0.gate_up_proj [" in problem for problem in report.problems)


def test_every_parameter_of_two_dimensions_is_a_matrix_but_embeddings_norms_and_head():
    model = tiny_model("mixtral")
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
    assert len(experts) == 8
    assert set(matrices(model)) == expected | experts


def test_what_the_settings_ignore_stays_as_it_was(tmp_path):
    chosen = settings("rtn-4bit", ignore=("*.1.mlp.down_proj", "o_proj"))
    made = make(chosen, tmp_path)
    report = check(made, chosen)
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
