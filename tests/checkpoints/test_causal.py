"""Models that see what comes after a token are refused: from the config, or by what they do."""

import re
import sys
from pathlib import Path

import pytest
import torch
from checkpoints.folders import write

from qbench.checkpoints import find, load_model
from qbench.checkpoints.checks import own_logits, require_causal
from qbench.checkpoints.find import ENCODERS
from qbench.errors import CheckpointError

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
         "intermediate_size": 48, "max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "is_decoder: true"),
        ({"model_type": "bert", "is_decoder": False}, "both sides of a token"),
        ({"model_type": "xlm-roberta"}, "both sides of a token"),
        ({"model_type": "xlnet"}, 'attn_type: "uni"'),
        ({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}, "both sides"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "both sides"),
        ({"model_type": "llama", "is_causal": False}, "is_causal: false"),
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            "it is a LlamaForSequenceClassification, which has no output over the vocabulary",
        ),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_models_that_are_not_causal_are_refused_from_the_config(tmp_path, config, words):
    with pytest.raises(CheckpointError, match=words):
        find(str(write(tmp_path / "c", {**SIZES, "hidden_size": 64, **config})))


def test_a_decoder_of_an_encoders_kind_is_accepted(tmp_path):
    config = {**SIZES, "hidden_size": 64, "model_type": "bert", "is_decoder": True}
    assert find(str(write(tmp_path / "c", config))).normalizer == "softmax"


def test_every_class_that_asks_for_is_decoder_is_known():
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    models = Path(transformers.__file__).parent / "models"
    asking = {
        path.parent.name.replace("_", "-")
        for path in models.glob("*/modeling_*.py")
        if re.search(r"as a standalone, add `is_decoder=True", path.read_text())
    }
    known = {kind.replace("_", "-") for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    ours = {kind.replace("_", "-").removesuffix("-text") for kind in ENCODERS}
    asking = {kind.removesuffix("-text") for kind in asking}
    assert len(asking) > 10
    assert {kind for kind in asking if any(k.startswith(kind) for k in known)} <= ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decoder", [True, False])
def test_what_a_model_does_is_checked_too(dtype, decoder):
    from transformers import BertConfig, BertLMHeadModel

    torch.manual_seed(0)
    config = BertConfig(**SIZES, is_decoder=decoder, initializer_range=0.2)
    model = BertLMHeadModel(config).to(dtype).eval()
    if decoder:
        require_causal(model, own_logits(model))
    else:
        with pytest.raises(CheckpointError, match="later tokens change the logits of earlier"):
            require_causal(model, own_logits(model))


def test_a_bidirectional_model_of_an_unknown_kind_is_refused_when_loaded(tmp_path, monkeypatch):
    from transformers import BertConfig, BertLMHeadModel

    torch.manual_seed(0)
    BertLMHeadModel(BertConfig(**SIZES, initializer_range=0.2)).save_pretrained(tmp_path)
    monkeypatch.setattr(sys.modules["qbench.checkpoints.find"], "ENCODERS", frozenset())
    with pytest.raises(CheckpointError, match="later tokens change the logits of earlier"):
        load_model(find(str(tmp_path)), dtype=torch.float32, device="cpu")
