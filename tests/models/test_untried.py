"""Classes that nobody tried: taken for what transformers' source says, and held against it."""

import dataclasses
import json

import pytest
import torch
from loading import load_model
from tiny import tiny_model, write_tiny

from qbench.attention.transformers import attend
from qbench.checkpoints import find
from qbench.checkpoints.load import own_logits, require_ours
from qbench.checkpoints.supported import CLASSES, model_support
from qbench.errors import UnavailableError


@pytest.mark.parametrize(
    ("kind", "native"),
    [
        ("diffllama", ""),
        ("doge", ""),
        ("vaultgemma", ""),
        ("openai-gpt", "this class was not tried"),
        ("xlstm", "its class computes attention itself"),
        ("of-a-later-transformers", "this class was not tried"),
    ],
)
def test_it_is_taken_for_what_the_source_of_transformers_says(kind, native):
    can = model_support({"model_type": kind})
    assert (can.native, can.scoring, can.models) == (native, "exact", "")


def test_one_that_fails_on_our_attention_is_refused(monkeypatch):
    model = tiny_model("llama")
    logits = own_logits(model)
    attend(model, normalizer="softmax", implementation="reference")

    def reads_the_mask(*_, **__):
        raise AttributeError("'Mask' object has no attribute 'dtype'")

    monkeypatch.setattr(model.model.layers[0].self_attn, "forward", reads_the_mask)
    with pytest.raises(UnavailableError, match=r"fails on qbench's attention \('Mask' .*: native"):
        require_ours(model, logits)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("mamba", "does not call the attention that it is given"),
        ("bloom", "does not take its attention from AttentionInterface"),
        ("mimo_v2_flash", "attention has no s_aux"),
    ],
)
def test_what_our_attention_lacks_is_never_left_out_in_silence(tmp_path, kind, words, monkeypatch):
    """As if the table said that the class ran on ours."""
    row = dataclasses.replace(CLASSES[kind], native="")
    monkeypatch.setitem(CLASSES, kind, row)
    found = find(str(write_tiny(tmp_path, kind)))
    with pytest.raises(UnavailableError, match=words):
        load_model(found, dtype=torch.float32, device="cpu")


def test_other_logits_than_its_own_are_refused():
    model = tiny_model("llama")
    logits = own_logits(model)
    require_ours(model, logits)
    with pytest.raises(UnavailableError, match="changes the logits of LlamaForCausalLM"):
        require_ours(model, logits + 0.1)


@pytest.mark.parametrize(
    ("kind", "stated", "scoring"),
    [
        ("mistral", {"sliding_window": 4096}, "exact"),
        ("mistral", {}, "exact"),  # the class's default is a window
        ("mistral", {"sliding_window": None}, "fast"),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False}, "fast"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "exact"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "exact"),
        ("granite", {"logits_scaling": 1.0}, "fast"),
        ("granite", {"logits_scaling": 8.0}, "lm-eval"),
        ("gemma2", {"attn_logit_softcapping": None}, "lm-eval"),
        ("cohere", {}, "lm-eval"),
        ("falcon_h1", {"lm_head_multiplier": 0.5}, "lm-eval"),
    ],
)
def test_the_configuration_decides_how_fast_it_can_be_scored(kind, stated, scoring):
    can = model_support(json.loads(json.dumps({"model_type": kind, **stated})))
    assert (can.scoring, bool(can.slower)) == (scoring, scoring != "fast")


def test_an_own_attention_that_a_class_lacks_is_refused(tmp_path):
    found = dataclasses.replace(find(str(write_tiny(tmp_path, "bloom"))), normalizer="native")
    with pytest.raises(UnavailableError, match="BloomForCausalLM has no sdpa of its own"):
        load_model(found, dtype=torch.float32, device="cpu", attention="sdpa")
