"""What is written in the other format gives the same logits, also to readers that are not ours."""

import json

import pytest
import torch
from checkpoints.folders import CONFIG, random_tensors, write
from loading import load_model
from safetensors.torch import load_file, save_file
from small_recipe import DEMO, qbench
from tiny import write_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from qbench.checkpoints import find
from qbench.checkpoints.convert import convert
from qbench.checkpoints.fla import logarithms
from qbench.errors import CheckpointError, OutputError

IDS = torch.randint(0, 32, (2, 23), generator=torch.Generator().manual_seed(1))
SOFTMAX = {"attn_impl": "parallel_attn"}
VARIANTS = {
    "softmax": SOFTMAX,
    "softpick": {},
    "rectified, grouped": {"attn_impl": "naive_rectified_attn", "num_kv_heads": 1},
    "norm": {**SOFTMAX, "qk_norm": True, "norm_eps": 1e-5},
    "norm and bias": {"qk_norm": True, "qkv_bias": True, "norm_eps": 1e-5},
    "window": {"attn_impl": "flash_attn", "window_size": 5},
    "scaled": {"attn_impl": "parallel_scaled_softpick_attn"},
    "window, bias": {"attn_impl": "flash_attn", "window_size": 5, "qkv_bias": True},
}
MEANT = ("model_type", "hidden_size", "num_heads", "num_kv_heads", "window_size", "qk_norm",
         "qkv_bias", "norm_eps", "rope_theta", "tie_word_embeddings", "vocab_size")  # fmt: skip


def source(folder, name, dtype=torch.float32):
    config = {**CONFIG, **VARIANTS[name]}
    tensors = {n: t.to(dtype) for n, t in random_tensors(config).items()}
    if name == "scaled":
        tensors["model.layers.0.attn.s"] = torch.tensor([[0.3], [1.5]])
        tensors |= logarithms(1, config["max_position_embeddings"])
    return write(folder, config, tensors), config, tensors


@torch.no_grad()
def logits(folder):
    model = load_model(find(str(folder)), dtype=torch.float32, device="cpu")
    return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("name", VARIANTS)
def test_there_and_back_again(tmp_path, name):
    folder, config, tensors = source(tmp_path / "fla", name)
    convert(find(str(folder)), "llama", tmp_path / "llama")
    convert(find(str(tmp_path / "llama")), "fla", tmp_path / "back")
    expected = logits(folder)
    assert torch.equal(logits(tmp_path / "llama"), expected)
    assert torch.equal(logits(tmp_path / "back"), expected)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[n], tensors[n]) for n in tensors)
    again = json.loads((tmp_path / "back" / "config.json").read_text())
    shared = config["num_kv_heads"] or config["num_heads"]
    meant = {**config, "num_kv_heads": shared}
    assert {k: again[k] for k in MEANT if k in config} == {
        k: meant[k] for k in MEANT if k in config
    }
    assert find(str(tmp_path / "back")).normalizer == find(str(folder)).normalizer


@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if v.get("attn_impl") in
                                  ("parallel_attn", "flash_attn")])  # fmt: skip
def test_plain_transformers_reads_what_was_written_for_it(tmp_path, name):
    folder, _, _ = source(tmp_path / "fla", name)
    convert(find(str(folder)), "llama", tmp_path / "out")
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    with torch.no_grad():
        found = model.eval()(IDS, use_cache=False).logits
    torch.testing.assert_close(found, logits(folder), rtol=1e-4, atol=1e-4)


def test_the_command_takes_tokenizer_and_generation_settings_along(tmp_path, capfd):
    assert qbench("convert", DEMO / "softpick", tmp_path / "out", "--to", "llama") == 0
    assert "model.safetensors" in capfd.readouterr().err
    before, after = (
        AutoTokenizer.from_pretrained(p) for p in (DEMO / "softpick", tmp_path / "out")
    )
    assert before("a text of words").input_ids == after("a text of words").input_ids
    assert find(str(tmp_path / "out")).normalizer == "softpick"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


REFUSED = [
    ("gpt2", {}, "flash-linear-attention has no GPT2LMHeadModel"),
    ("llama", {"head_dim": 16}, "head_dim 16: .*does not have that"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
     "rope_parameters"),
    ("qwen3", {}, "rms_norm_eps 1e-06"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2,
               "use_sliding_window": True, "sliding_window": 8}, "one window for all layers"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "words"), REFUSED)
def test_what_the_other_format_cannot_say_is_refused_and_nothing_is_written(
    tmp_path, kind, changes, words
):
    folder = write_tiny(tmp_path / "in", kind, **changes)
    with pytest.raises(CheckpointError, match=words):
        convert(find(str(folder)), "fla", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("more", [{}, {"model.layers.0.self_attn.odd": torch.ones(2)}])
def test_what_cannot_be_read_is_not_written(tmp_path, more):
    path = write_tiny(tmp_path / "in", "llama") / "model.safetensors"
    tensors = load_file(path) | more
    if not more:
        del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"in: .*(missing: model\.norm|left over)"):
        convert(find(str(tmp_path / "in")), "fla", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_slopes_are_refused_where_the_other_format_would_pass_them_over(tmp_path):
    folder = write_tiny(tmp_path / "in", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "qbench_normalizer": "softmax"}))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.alibi_slopes"] = torch.tensor([0.5, 0.25])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"alibi_slopes: flash-linear-attention.* not have it"
    ):
        convert(find(str(folder)), "fla", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_norms_of_two_kinds_cannot_be_written_for_transformers(tmp_path):
    config = {**CONFIG, "qk_norm": True}
    folder = write(tmp_path / "in", config, random_tensors(config))
    with pytest.raises(CheckpointError, match=r"norm_eps 1e-06 with qk_norm: .*have 1e-05"):
        convert(find(str(folder)), "llama", tmp_path / "out")


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    folder, _, _ = source(tmp_path / "in", "softmax")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(OutputError, match="is not empty; name a new folder"):
        convert(find(str(folder)), "llama", tmp_path / "out")
    with pytest.raises(CheckpointError, match="it is in this format already"):
        convert(find(str(folder)), "fla", tmp_path / "other")


def test_nothing_half_written_stays(tmp_path, monkeypatch):
    folder, _, _ = source(tmp_path / "in", "softmax")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qbench.checkpoints.convert.save_tensors", full)
    with pytest.raises(OutputError, match=r"out: cannot be written \(No space left on device\)"):
        convert(find(str(folder)), "llama", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_tokenizer_that_would_cut_texts_otherwise_is_refused(tmp_path):
    """transformers builds Qwen2Tokenizer, which splits as Qwen 2 did, from these files; without
    the class's name they are a byte-level tokenizer that splits otherwise."""
    folder = write_tiny(tmp_path / "qwen2", "qwen2")
    stated = json.loads((folder / "tokenizer_config.json").read_text())
    stated["tokenizer_class"] = "Qwen2Tokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    with pytest.raises(CheckpointError, match="its scores would change, so nothing is written"):
        convert(find(str(folder)), "fla", tmp_path / "out")
    assert not (tmp_path / "out").exists()
