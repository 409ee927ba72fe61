"""Models of other classes are scored right, or refused with the reason and what to say instead."""

from __future__ import annotations

import pytest
import torch
import transformers
from scoring_models import choices, scorer

from qbench.errors import UnavailableError
from qbench.evaluation.settings import Tolerance

SMALL = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.15,
}  # fmt: skip
AFTER_HEAD = r"changes its logits after the LM head.*use scoring: lm-eval"
WINDOWS = "windows or other layers; use scoring: exact"
# Class, changes of the configuration, what exact and what fast scoring say (None: they score).
MODELS = {
    "Llama": ("Llama", {}, None, None),
    "Llama, tied": ("Llama", {"tie_word_embeddings": True}, None, None),
    "Qwen2": ("Qwen2", {}, None, None),
    "Qwen3": ("Qwen3", {"head_dim": 16}, None, None),
    "Phi": ("Phi", {}, None, None),
    "Phi3": ("Phi3", {}, None, None),
    "Olmo2": ("Olmo2", {}, None, None),
    "StableLm": ("StableLm", {}, None, "StableLmForCausalLM .*use scoring: exact"),
    "GPTNeoX": ("GPTNeoX", {}, None, None),
    "Starcoder2": ("Starcoder2", {"sliding_window": None}, None, None),
    "Mistral": ("Mistral", {"sliding_window": 8}, None, WINDOWS),
    "Granite": ("Granite", {"logits_scaling": 8.0}, AFTER_HEAD, AFTER_HEAD),
    "Cohere": ("Cohere", {"logit_scale": 0.0625}, AFTER_HEAD, AFTER_HEAD),
    "Gemma2": ("Gemma2", {"head_dim": 16}, AFTER_HEAD, AFTER_HEAD),
    "Falcon": ("Falcon", {"alibi": False}, None, "use scoring: exact"),
    "Bloom": ("Bloom", {"n_layer": 2, "n_head": 4}, None, "use scoring: exact"),
    "GPT2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}, None, None),
    "Mamba": ("Mamba", {}, None, "use scoring: exact"),
}  # fmt: skip


def model_of(name: str):
    kind, changes, *_ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SMALL | changes))
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_scored_as_lm_eval_scores_it_or_refused(name, mode):
    model, requests = model_of(name), choices(4)
    refusal = MODELS[name][2 if mode == "exact" else 3]
    bounds = Tolerance(mean=1e-3, largest=1e-3, changed=0.0)
    if refusal is not None:
        with pytest.raises(UnavailableError, match=refusal):
            scorer(model, mode, tolerance=bounds)
        return
    expected = scorer(model, "lm-eval").loglikelihood(requests, disable_tqdm=True)
    ours = scorer(model, mode, tolerance=bounds).loglikelihood(requests, disable_tqdm=True)
    assert [a for a, _ in ours] == pytest.approx([a for a, _ in expected], abs=1e-3)
