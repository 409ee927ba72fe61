"""Weights into stock transformers models."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from qbench.checkpoints import find, load_model
from qbench.errors import CheckpointError

SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def stock(tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    return tmp_path


def test_a_stock_llama_gives_the_logits_of_transformers(stock):
    ids = torch.arange(24).reshape(2, 12)
    ours = load_model(find(str(stock)), dtype=torch.float32, device="cpu")
    theirs = AutoModelForCausalLM.from_pretrained(stock, attn_implementation="eager").eval()
    assert ours.config._attn_implementation == "qbench-softmax-reference"
    with torch.inference_mode():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_stock_llama_that_says_softpick_runs_softpick(stock):
    config = json.loads((stock / "config.json").read_text())
    ids = torch.arange(24).reshape(2, 12)
    softmax = load_model(find(str(stock)), dtype=torch.float32, device="cpu")
    (stock / "config.json").write_text(json.dumps({**config, "qbench_normalizer": "softpick"}))
    softpick = load_model(find(str(stock)), dtype=torch.float32, device="cpu")
    assert softpick.config._attn_implementation == "qbench-softpick-reference"
    with torch.inference_mode():
        assert (softpick(ids).logits - softmax(ids).logits).abs().max() > 1e-3


def test_a_stock_checkpoint_with_a_missing_tensor_is_refused(stock):
    from safetensors.torch import load_file, save_file

    path = stock / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.mlp\.up_proj"):
        load_model(find(str(stock)), dtype=torch.float32, device="cpu")


def test_a_checkpoint_that_changes_under_a_run_is_refused(stock):
    found = find(str(stock))
    path = stock / "model.safetensors"
    path.write_bytes(path.read_bytes())  # the same size, another time
    with pytest.raises(CheckpointError, match="changed after this run began"):
        load_model(found, dtype=torch.float32, device="cpu")


def test_a_stock_checkpoint_with_a_misshapen_tensor_is_refused_with_its_name(stock):
    from safetensors.torch import load_file, save_file

    path = stock / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 64)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"misshapen: .*model\.layers\.1\.mlp\.up_proj"):
        load_model(find(str(stock)), dtype=torch.float32, device="cpu")
