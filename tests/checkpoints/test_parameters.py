"""Tensors of a normalizer come with the checkpoint, in either format."""

import json

import pytest
import torch
from checkpoints.folders import CONFIG, random_tensors, write
from loading import load_model, require_refused
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from qbench.checkpoints import find
from qbench.errors import CheckpointError

NAME = {"fla": "model.layers.0.attn.s", "stock": "model.layers.0.self_attn.s"}
SCALED = "scalable-softmax"  # of a parameter s per head


def folder(path, format, normalizer, change=None):
    """A checkpoint of one layer with two heads whose scales are ½ and 3."""
    if format == "fla":
        config = {key: value for key, value in CONFIG.items() if key != "attn_impl"}
        tensors = random_tensors()
    else:
        torch.manual_seed(0)
        llama = LlamaConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=1,
                            intermediate_size=96, vocab_size=32)  # fmt: skip
        LlamaForCausalLM(llama).save_pretrained(path)
        config = json.loads((path / "config.json").read_text())
        tensors = load_file(path / "model.safetensors")
    tensors[NAME[format]] = torch.tensor([0.5, 3.0])
    if change:
        change(tensors)
    write(path, {**config, "qbench_normalizer": normalizer}, tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


@pytest.mark.parametrize("format", NAME)
@torch.no_grad()
def test_they_are_read_and_used(tmp_path, format):
    checkpoint = find(folder(tmp_path, format, SCALED))
    model = load_model(checkpoint, dtype=torch.bfloat16, device="cpu")
    module = model.model.layers[0].self_attn
    assert torch.equal(module.s, torch.tensor([0.5, 3.0]).bfloat16())
    assert not module.s.requires_grad
    ids = torch.arange(12)[None]
    before = model(ids).logits
    assert torch.equal(model(ids).logits, before)
    module.s.mul_(2)
    assert not torch.equal(model(ids).logits, before)


@pytest.mark.parametrize(
    ("format", "name", "words"),
    [
        ("fla", NAME["fla"], r"misshapen: .*self_attn\.s \[3\] instead of \[2\]"),
        ("fla", "model.layers.1.attn.s", r"left over: .*layers\.1\."),
        ("stock", NAME["stock"], r"misshapen: .*self_attn\.s \[3\] instead of \[2\]"),
        ("stock", "model.layers.7.self_attn.s", r"left over: .*\.7\."),
        ("stock", "model.layers.0.self_attn.z", r"left over: .*\.z"),
    ],
)
def test_they_are_held_against_the_model(tmp_path, format, name, words):
    checkpoint = find(folder(tmp_path, format, SCALED, lambda t: t.update({name: torch.ones(3)})))
    require_refused(checkpoint, words)


@pytest.mark.parametrize("format", NAME)
def test_another_normalizer_has_no_use_for_them(tmp_path, format):
    require_refused(find(folder(tmp_path, format, "softpick")), r"left over: .*self_attn\.s")


@pytest.mark.parametrize("format", NAME)
def test_a_checkpoint_without_them_is_refused_before_it_is_loaded(tmp_path, format):
    assert find(folder(tmp_path / "a", format, SCALED)).normalizer == SCALED
    without = folder(tmp_path / "b", format, SCALED, lambda tensors: tensors.pop(NAME[format]))
    with pytest.raises(CheckpointError, match=r"missing: s of every attention module"):
        find(without)


def test_a_layer_that_lacks_what_others_have_is_named(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=3,
                         intermediate_size=96, vocab_size=32)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in (0, 2):
        tensors[f"model.layers.{layer}.self_attn.alibi_slopes"] = torch.tensor([0.5, 0.25])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    require_refused(find(str(tmp_path)), r"missing: model\.layers\.1\.self_attn\.alibi_slo")
