"""What a quantizer of weights must cover, however a model stores it, and what happens if not."""

import copy

import pytest
import torch
from quantizer_models import check, llama, make, settings
from tiny import SPARSE_KEYS, tiny_model

from qbench.errors import QuantizationError
from qbench.quantizers import config_of
from qbench.quantizers.config import matching
from qbench.quantizers.linear import linears


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


@pytest.mark.parametrize("name", ["rtn-8bit:group_size=16", "bnb-8bit", "w8a8-int8"])
def test_what_a_class_keeps_in_float32_stays_so(name, tmp_path):
    """The indexer of DeepSeek V3.2 casts its input to the dtype of ``weights_proj``: codes of a
    quantized weight would make whole numbers of it."""
    sizes = {"num_hidden_layers": 2, "first_k_dense_replace": 2, "index_topk": 16}
    original = tiny_model("deepseek_v32", **{**SPARSE_KEYS, **sizes})
    chosen = config_of(name, compute_dtype="float32")
    report = check(make(chosen, tmp_path, model=copy.deepcopy(original)), chosen, original)
    kept = [f"model.layers.{layer}.self_attn.indexer.weights_proj" for layer in (0, 1)]
    assert [n for n in report.left_out if n in kept] == kept
    assert report.left_out_because[kept[0]] == "kept in float32 by its class"
    assert not [one for one in report.modules if one.name in kept]
    assert not [line for line in report.problems if "weights_proj" in line], report.problems
