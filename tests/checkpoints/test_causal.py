"""Models that see later tokens, or give no probability of a text, are refused."""

import pytest
import torch
from checkpoints.folders import write
from loading import load_model
from transformers import LlamaConfig, LlamaForSequenceClassification

from qbench.checkpoints import find
from qbench.errors import CheckpointError

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
         "intermediate_size": 48, "max_position_embeddings": 64}  # fmt: skip


def test_an_encoder_decoder_is_refused_from_its_config(tmp_path):
    config = {**SIZES, "model_type": "t5", "is_encoder_decoder": True}
    with pytest.raises(CheckpointError, match="is_encoder_decoder: true"):
        find(str(write(tmp_path / "c", config)))


def test_a_classifier_lacks_its_output_over_the_vocabulary(tmp_path):
    LlamaForSequenceClassification(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        load_model(find(str(tmp_path)), dtype=torch.float32, device="cpu")


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
