"""From a folder to a Checkpoint: what is accepted, and how the rest is refused."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from qbench.checkpoints import find
from qbench.checkpoints.find import compare_shapes, shapes
from qbench.checkpoints.flash_linear_attention import expected_shapes, llama_name, llama_settings
from qbench.errors import CheckpointError

CONFIG = {
    "model_type": "transformer", "attn_impl": "parallel_softpick_attn", "hidden_size": 64,
    "num_heads": 2, "num_kv_heads": None, "num_hidden_layers": 1, "vocab_size": 32,
    "intermediate_size": 96, "max_position_embeddings": 128, "norm_eps": 1e-6,
    "rope_theta": 10000.0, "hidden_act": "swish", "tie_word_embeddings": False,
}  # fmt: skip
FLA_NAMES = {
    "model.embed_tokens.": "model.embeddings.", ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".mlp_norm.", ".self_attn.": ".attn.",
}  # fmt: skip


def fla_name(name):
    for ours, theirs in FLA_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def write(folder, config=CONFIG, tensors=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is None:
        wanted = expected_shapes(llama_settings(CONFIG))
        tensors = {fla_name(name): torch.zeros(shape) for name, shape in wanted.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_the_normalizer_comes_from_the_checkpoint(tmp_path):
    found = find(str(write(tmp_path / "c")))
    assert (found.normalizer, found.format) == ("softpick", "flash-linear-attention")
    assert found.max_length == 128


@pytest.mark.parametrize(
    ("implementation", "normalizer"),
    [("parallel_attn", "softmax"), ("naive_softpick_attn", "softpick")],
)
def test_every_published_attention_has_its_normalizer(tmp_path, implementation, normalizer):
    config = {**CONFIG, "attn_impl": implementation}
    assert find(str(write(tmp_path / "c", config))).normalizer == normalizer


def test_a_recipe_that_contradicts_the_checkpoint_is_refused(tmp_path):
    folder = write(tmp_path / "c")
    assert find(str(folder), normalizer="softpick").normalizer == "softpick"
    with pytest.raises(CheckpointError, match=r"trained with softpick, the recipe says .*softmax"):
        find(str(folder), normalizer="softmax")


def test_a_relative_path_is_relative_to_the_recipe(tmp_path):
    write(tmp_path / "c")
    assert find("c", base=tmp_path).folder == (tmp_path / "c").resolve()


def test_the_digest_is_of_weights_and_configuration(tmp_path):
    first = find(str(write(tmp_path / "a"))).digest
    assert find(str(write(tmp_path / "b"))).digest == first
    assert find(str(write(tmp_path / "c", {**CONFIG, "rope_theta": 5e5}))).digest != first


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_impl": "flash_new_attn"}, "'flash_new_attn' is not known; known: parallel_attn"),
        ({"qk_norm": True}, "qk_norm=True"),
        ({"window_size": 128}, "sliding-window"),
        ({"qbench_normalizer": "softmax"}, "contradicts itself"),
        ({"quantization_config": {"bits": 4}}, "quantized already"),
        ({"model_type": "llama", "qbench_normalizer": "softpik"}, "'softpik' is not known"),
    ],
)
def test_a_configuration_that_cannot_be_run_is_refused(tmp_path, changes, words):
    with pytest.raises(CheckpointError, match=words):
        find(str(write(tmp_path / "c", {**CONFIG, **changes})))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.0.attn.q_proj.weight"), r"missing: model\.layers\.0\.self_"),
        (lambda t: t.update({"model.layers.0.attn.s": torch.zeros(2)}), r"left over: .*attn\.s"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"misshapen: .*\[3\] instead"),
    ],
    ids=["missing", "left over", "misshapen"],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, words):
    wanted = expected_shapes(llama_settings(CONFIG))
    tensors = {fla_name(name): torch.zeros(shape) for name, shape in wanted.items()}
    change(tensors)
    with pytest.raises(CheckpointError, match=words):
        find(str(write(tmp_path / "c", tensors=tensors)))


@pytest.mark.parametrize("key", ["hidden_size", "num_heads", "vocab_size", "num_hidden_layers"])
def test_a_configuration_without_a_size_is_refused_with_its_name(tmp_path, key):
    config = {k: v for k, v in CONFIG.items() if k != key}
    with pytest.raises(CheckpointError, match=key):
        find(str(write(tmp_path / "c", config)))


def test_many_problems_are_counted_not_listed():
    with pytest.raises(CheckpointError, match="and 14 more"):
        compare_shapes({}, {f"t{n}": [1] for n in range(20)})


def test_a_pickle_is_refused_with_the_way_to_convert_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickle.*save_file\(torch\.load\('pytorch_model"):
        find(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"nonsense", struct.pack("<Q", 2**60) + b"{}"])
def test_a_file_that_is_no_safetensors_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a safetensors file"):
        shapes(tmp_path)


def test_a_source_that_is_neither_folder_nor_hub_id_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        find("./nowhere", base=tmp_path)


def test_an_unreachable_hub_names_the_option_that_helps():
    with pytest.raises(CheckpointError, match="--checkpoint NAME=FOLDER"):
        find("nobody/no-such-model")


def test_published_sizes_follow_from_the_configuration_as_upstream():
    for hidden, inner in ((1024, 2816), (2048, 5632), (384, 1024)):
        config = {**CONFIG, "hidden_size": hidden, "intermediate_size": None}
        assert llama_settings(config)["intermediate_size"] == inner


def test_names_of_a_layer_carry_over():
    assert (
        llama_name("model.layers.3.attn.o_proj.weight") == "model.layers.3.self_attn.o_proj.weight"
    )
    assert llama_name("model.layers.3.mlp.up_proj.weight") == "model.layers.3.mlp.up_proj.weight"
