"""Weight files that would be read wrongly are refused; the digest is of all that is read."""

import json
import pickle
import re
import struct
import sys
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints.folders import CONFIG, random_tensors, write
from loading import load_model
from safetensors.torch import save_file

from qbench.checkpoints import find
from qbench.checkpoints.find import files_read, weight_files
from qbench.errors import CheckpointError

INDEX = "model.safetensors.index.json"
STOCK = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 32}
CONFIGS = pytest.mark.parametrize("config", [CONFIG, {**CONFIG, **STOCK}], ids=["fla", "stock"])


def index(folder, files, **metadata):
    (folder / INDEX).write_text(json.dumps({"weight_map": files, **metadata}))


def shards(folder, config=CONFIG):
    """A checkpoint in two files with an index; the names of what the second holds."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_tensors()
    last = [name for name in tensors if not name.startswith("model.layers")]
    first = [name for name in tensors if name not in last]
    save_file({name: tensors[name] for name in first}, folder / "model-1.safetensors")
    save_file({name: tensors[name] for name in last}, folder / "model-2.safetensors")
    files = dict.fromkeys(first, "model-1.safetensors") | dict.fromkeys(last, "model-2.safetensors")
    index(folder, files, metadata={})
    return files


@CONFIGS
def test_shards_that_the_index_lists_are_read(tmp_path, config):
    shards(tmp_path / "c", config)
    assert find(str(tmp_path / "c")).digest


def test_files_that_transformers_does_not_read_are_not_read(tmp_path):
    """It reads what the index lists, or model.safetensors; both at once are ambiguous."""
    shards(tmp_path / "c")
    before = find(str(tmp_path / "c"))
    save_file({"lm_head.weight": torch.ones(32, 64)}, tmp_path / "c" / "model-3.safetensors")
    assert find(str(tmp_path / "c")).digest == before.digest
    save_file({"lm_head.weight": torch.ones(32, 64)}, tmp_path / "c" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"not listed in .*; remove one of the two"):
        find(str(tmp_path / "c"))


@pytest.mark.parametrize(
    ("added", "metadata", "words"),
    [
        ({"x": "../y.safetensors"}, {"metadata": {}}, "no weight_map"),
        ({"x": 3}, {"metadata": {}}, "no weight_map"),
        ({"x": "model-9.safetensors"}, {"metadata": {}}, "that are missing: model-9"),
        ({}, {}, "has no metadata"),  # which transformers needs
    ],
)
def test_an_index_that_is_not_of_these_files_is_refused(tmp_path, added, metadata, words):
    index(tmp_path / "c", shards(tmp_path / "c") | added, **metadata)
    with pytest.raises(CheckpointError, match=words):
        find(str(tmp_path / "c"))


@pytest.mark.parametrize("alone", [False, True])
def test_an_adapter_is_refused(tmp_path, alone):
    folder = write(tmp_path / "c", {**CONFIG, **STOCK})
    (folder / "adapter_config.json").write_text("{}")
    if alone:  # as PEFT saves it
        (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="merge it"):
        find(str(tmp_path / "c"))


@CONFIGS
@pytest.mark.parametrize(("dtype", "word"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_numbers_that_are_no_weights_are_refused(tmp_path, config, dtype, word):
    tensors = random_tensors()
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    with pytest.raises(CheckpointError, match=rf"up_proj\.weight.* is of type {word}, in"):
        find(str(write(tmp_path / "c", config, tensors)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_floating_point_weights_of_every_width_are_accepted(tmp_path, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors().items()}
    assert find(str(write(tmp_path / "c", tensors=tensors))).normalizer == "softpick"


def test_masks_that_old_files_carry_along_are_no_weights(tmp_path):
    tensors = random_tensors() | {"gpt_neox.layers.0.attention.bias": torch.ones(2, 2).bool()}
    assert find(str(write(tmp_path / "c", {**CONFIG, **STOCK}, tensors))).digest


def with_shape(shape, data):
    """A safetensors file of one tensor of this shape whose numbers are ``data``."""
    header = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


NO_SAFETENSORS = {
    "text": b"nonsense",
    "long header": struct.pack("<Q", 2**60) + b"{}",
    "cut short": with_shape([1], b""),
    "overflow": with_shape([2**40, 2**40], b"1234"),
    "pickle": pickle.dumps({"a": 1}),
}


@pytest.mark.parametrize("name", NO_SAFETENSORS)
def test_a_file_that_is_no_safetensors_is_named(tmp_path, name):
    (write(tmp_path / "c") / "model.safetensors").write_bytes(NO_SAFETENSORS[name])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a safetensors file"):
        find(str(tmp_path / "c"))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_git_lfs_pointer_is_said_to_be_one(tmp_path, name):
    folder = write(tmp_path / "c")
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(CheckpointError, match=rf"{name} is a git-lfs pointer.*git lfs pull"):
        find(str(folder))


READ = [
    "generation_config.json", "tokenizer.json", "chat_template.jinja",
    "additional_chat_templates/tools.jinja", "vocab.txt", "spiece.model",
]  # fmt: skip
NOT_READ = ["README.md", "training.json", "optimizer.pt"]


def digest_with(folder: Path, name: str, content: str) -> str:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content)
    return find(str(folder)).digest


@pytest.mark.parametrize("name", READ)
def test_what_is_read_changes_the_digest(tmp_path, name):
    folder = write(tmp_path / "c")
    digests = [find(str(folder)).digest, *(digest_with(folder, name, t) for t in ("{}", '{"a":1}'))]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("name", NOT_READ)
def test_what_is_not_read_leaves_the_digest(tmp_path, name):
    folder = write(tmp_path / "c")
    assert find(str(folder)).digest == digest_with(folder, name, "{}")


def test_the_digest_is_of_weights_and_configuration(tmp_path):
    first = find(str(write(tmp_path / "a"))).digest
    assert find(str(write(tmp_path / "b"))).digest == first
    assert find(str(write(tmp_path / "c", {**CONFIG, "rope_theta": 5e5}))).digest != first


def test_large_files_are_hashed_in_parts(tmp_path, monkeypatch):
    folder = str(write(tmp_path / "c"))
    whole = find(folder).digest
    monkeypatch.setattr(sys.modules["qbench.checkpoints.find"], "LARGE", 0)
    assert find(folder).digest == find(folder).digest != whole


def test_files_that_every_tokenizer_of_transformers_names_are_read(tmp_path):
    folder = write(tmp_path / "c")
    models = Path(transformers.__file__).parent / "models"
    named = {
        name
        for path in models.glob("*/tokenization_*.py")
        for table in re.findall(r"VOCAB_FILES_NAMES = \{([^}]*)\}", path.read_text())
        for name in re.findall(r':\s*"([^"]+)"', table)
    }
    assert len(named) > 10, "the tables of vocabulary files are not where they were"
    for name in named:
        (folder / name).write_text("{}")
    assert named <= {name for name, *_ in files_read(folder, weight_files(folder))}


def test_generation_settings_of_the_folder_reach_the_model(tmp_path):
    folder = write(tmp_path / "c")
    (folder / "generation_config.json").write_text('{"repetition_penalty": 1.7}')
    model = load_model(find(str(folder)), dtype=torch.float32, device="cpu")
    assert model.generation_config.repetition_penalty == 1.7


def test_generation_settings_that_transformers_refuses_are_one_line(tmp_path):
    folder = write(tmp_path / "c")
    (folder / "generation_config.json").write_text('{"early_stopping": 3.5}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: .*early_stop") as error:
        load_model(find(str(folder)), dtype=torch.float32, device="cpu")
    assert len(str(error.value).splitlines()) == 1
