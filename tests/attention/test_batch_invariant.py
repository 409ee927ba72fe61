"""The kernels' model attends by the reference for a while, and by its kernels again."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qbench.attention.transformers import _registered, attend, batch_invariant


def llama():
    config = LlamaConfig(
        vocab_size=31, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("normalizer", ["softpick", "softmax"])
def test_the_kernels_stand_back_and_return(normalizer):
    model = llama()
    attend(model, normalizer=normalizer, implementation="reference")
    ids = torch.arange(12).view(2, 6)
    expected = model(ids).logits
    model.set_attn_implementation(_registered(normalizer, "triton"))  # needs no GPU to be named
    with batch_invariant(model):
        assert model.config._attn_implementation == f"qbench-{normalizer}-reference"
        assert torch.equal(model(ids).logits, expected)
    assert model.config._attn_implementation == f"qbench-{normalizer}-triton"


def test_other_attention_stays():
    model = llama()
    before = model.config._attn_implementation
    with batch_invariant(model):
        assert model.config._attn_implementation == before
