"""Weights into stock transformers models; those that see later tokens are refused."""

import json

import pytest
import torch
from checkpoints.folders import CONFIG, random_tensors, write
from loading import load_model, require_refused, save_as_transformers
from safetensors.torch import load_file, save_file
from tiny import write_tiny
from transformers import BertConfig, BertLMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qbench.checkpoints import find
from qbench.checkpoints.load import unlike_files
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


def test_a_checkpoint_that_changes_under_a_run_is_refused(stock):
    checkpoint = find(str(stock))
    path = stock / "model.safetensors"
    path.write_bytes(path.read_bytes())  # the same size, another time
    with pytest.raises(CheckpointError, match="changed after this run began"):
        load_model(checkpoint, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("format", ["stock", "flash-linear-attention"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name_and_number(stock, format, value):
    if format != "stock":
        write(stock, tensors=(tensors := random_tensors()))
        name = "model.embeddings.weight"
    else:
        tensors, name = load_file(stock / "model.safetensors"), "model.embed_tokens.weight"
    tensors[name][3:8, 2] = value
    save_file(tensors, stock / "model.safetensors", metadata={"format": "pt"})
    words = (
        r"NaN or infinite.*embed_tokens\.weight \(5 of \d+ val.*; fetch them again, or, .* float32"
    )
    with pytest.raises(CheckpointError, match=words):
        load_model(find(str(stock)), dtype=torch.bfloat16, device="cpu")


def test_angles_of_some_dimensions_alone_are_loaded(tmp_path):
    """As Gemma 4's: zeros are joined to a rotary embedding's numbers."""
    if "proportional" not in ROPE_INIT_FUNCTIONS:
        pytest.skip("a later release of transformers has it")
    rope = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e4}
    config = LlamaConfig(**SMALL, rope_parameters=rope)
    made = LlamaForCausalLM(config)
    made.save_pretrained(tmp_path)
    model = load_model(find(str(tmp_path)), dtype=torch.float32, device="cpu")
    assert torch.equal(model.model.rotary_emb.inv_freq, made.model.rotary_emb.inv_freq)


def test_weights_that_overflow_the_dtype_are_refused(stock):
    tensors = load_file(stock / "model.safetensors")
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, stock / "model.safetensors", metadata={"format": "pt"})
    assert load_model(find(str(stock)), dtype=torch.float32, device="cpu")
    with pytest.raises(CheckpointError, match=r"in float16: model\.norm\.weight \(1 of 64 values"):
        load_model(find(str(stock)), dtype=torch.float16, device="cpu")


@pytest.mark.parametrize("format", ["stock", "flash-linear-attention"])
def test_a_tied_checkpoint_may_store_its_head_only_as_a_copy(tmp_path, format):
    tied = {"tie_word_embeddings": True}
    if format == "stock":
        LlamaForCausalLM(LlamaConfig(**SMALL, **tied)).save_pretrained(tmp_path)
        tensors, embeddings = load_file(tmp_path / "model.safetensors"), "model.embed_tokens.weight"
    else:
        tensors, embeddings = random_tensors(), "model.embeddings.weight"
        write(tmp_path, {**CONFIG, **tied}, tensors)
    tensors["lm_head.weight"] = tensors[embeddings].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(find(str(tmp_path)), dtype=torch.float32, device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings: true, but lm_head\.weight"):
        load_model(find(str(tmp_path)), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    "change",
    [{"num_key_value_heads": 3}, {"hidden_act": "nosuch"}, {"model_type": "nosuch"},
     {"rope_parameters": {"rope_type": "nosuch"}}, {"head_dim": "x"}, {"hidden_size": 63}],
    ids=str,
)  # fmt: skip
def test_what_transformers_cannot_make_is_one_line(stock, change):
    config = json.loads((stock / "config.json").read_text())
    (stock / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError) as refusal:
        load_model(find(str(stock)), dtype=torch.float32, device="cpu")
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize("kind", ["fla", "stock"])
def test_a_parameter_that_is_not_its_files_tensor_is_named(tmp_path, kind):
    folder = write(tmp_path / "c")
    if kind == "stock":
        folder = save_as_transformers(folder, tmp_path / "stock")
    checkpoint = find(str(folder))
    model = load_model(checkpoint, dtype=torch.bfloat16, device="cpu")
    assert unlike_files(model, checkpoint) == []
    model.model.layers[0].mlp.up_proj.weight.data[3, 5] += 1
    assert unlike_files(model, checkpoint) == [
        "model.layers.0.mlp.up_proj.weight: differs from the tensor in model.safetensors"
    ]


@pytest.mark.parametrize(
    ("size", "value", "words"),
    [
        ("vocab_size", 48, r"misshapen: .*\[32, 64\] instead of \[48, 64\]"),
        ("hidden_size", 80, r"misshapen: .*\[32, 64\] instead of \[32, 80\]"),
        ("num_hidden_layers", 3, r"missing: model\.layers\.1\..* and \d+ more"),
    ],
)
def test_sizes_that_the_tensors_contradict_are_named(tmp_path, size, value, words):
    require_refused(find(str(write(tmp_path / "c", {**CONFIG, size: value}))), words)


@pytest.mark.parametrize("change", ["missing", "misshapen"])
def test_experts_that_cannot_be_joined_are_named_as_such(change, tmp_path):
    folder = write_tiny(tmp_path, "mixtral")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if ".experts.3." in name)
    weight = tensors.pop(name)
    if change == "misshapen":
        tensors[name] = torch.zeros(weight.shape[0] + 8, weight.shape[1])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    require_refused(find(str(folder)), "misshapen|as of its experts, of which one may be missing")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decoder", [True, False])
def test_what_a_model_does_is_looked_at_when_it_is_loaded(tmp_path, dtype, decoder):
    torch.manual_seed(0)
    config = BertConfig(**SMALL, is_decoder=decoder, initializer_range=0.2)
    BertLMHeadModel(config).save_pretrained(tmp_path)
    if decoder:
        load_model(find(str(tmp_path)), dtype=dtype, device="cpu")
    else:
        with pytest.raises(CheckpointError, match="later tokens change the logits of earlier"):
            load_model(find(str(tmp_path)), dtype=dtype, device="cpu")
