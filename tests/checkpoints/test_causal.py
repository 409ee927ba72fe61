"""Models that see what comes after a token are refused: from the config, or by what they do."""

import pytest
import torch
from checkpoints.folders import write
from loading import load_model

from qbench.checkpoints import find
from qbench.errors import CheckpointError

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
         "intermediate_size": 48, "max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}, "both sides"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "both sides"),
        ({"model_type": "llama", "is_causal": False}, "is_causal: false"),
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            "it is a LlamaForSequenceClassification, which has no output over the vocabulary",
        ),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_models_that_are_not_causal_are_refused_from_the_config(tmp_path, config, words):
    with pytest.raises(CheckpointError, match=words):
        find(str(write(tmp_path / "c", {**SIZES, "hidden_size": 64, **config})))


def test_a_decoder_of_an_encoders_kind_is_accepted(tmp_path):
    config = {**SIZES, "hidden_size": 64, "vocab_size": 32, "num_hidden_layers": 1}
    config |= {"model_type": "bert", "is_decoder": True}
    assert find(str(write(tmp_path / "c", config))).normalizer == "softmax"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decoder", [True, False])
def test_what_a_model_does_is_looked_at_when_it_is_loaded(tmp_path, dtype, decoder):
    from transformers import BertConfig, BertLMHeadModel

    torch.manual_seed(0)
    config = BertConfig(**SIZES, is_decoder=decoder, initializer_range=0.2)
    BertLMHeadModel(config).save_pretrained(tmp_path)
    if decoder:
        load_model(find(str(tmp_path)), dtype=dtype, device="cpu")
    else:
        with pytest.raises(CheckpointError, match="later tokens change the logits of earlier"):
            load_model(find(str(tmp_path)), dtype=dtype, device="cpu")
