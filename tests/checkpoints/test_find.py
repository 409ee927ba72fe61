"""From a folder to a Checkpoint: what is accepted, and how the rest is refused."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints.folders import CONFIG, write
from transformers import AutoTokenizer

from qbench.checkpoints import find
from qbench.checkpoints.from_gguf import tokenizer_problem
from qbench.checkpoints.tokenizer import load_tokenizer, tokenizer_difference
from qbench.errors import CheckpointError


def test_the_normalizer_comes_from_the_checkpoint_and_a_recipe_may_not_contradict_it(tmp_path):
    folder = write(tmp_path / "c")
    assert find(str(folder)).max_length == 128
    assert {find(str(folder), normalizer=n).normalizer for n in (None, "softpick")} == {"softpick"}
    with pytest.raises(CheckpointError, match=r"json says softpick, but the recipe .*softmax"):
        find(str(folder), normalizer="softmax")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_impl": "flash_new_attn"}, "'flash_new_attn' is unknown; known: flash_attn"),
        ({"qbench_normalizer": "softmax"}, "contradicts itself"),
        ({"qbench_normalizer": []}, r"qbench_normalizer \[\] is unknown"),
        ({"quantization_config": {"bits": 4}}, "quantized already"),
        ({"transformers_weights": "a.safetensors"}, "_weights names another .*; rename that file"),
        ({"model_type": None}, "model_type None is not a causal language model"),
        ({"model_type": "mine", "auto_map": {}}, "'mine' is not a causal .*never run"),
        ({"model_type": "llama", "qbench_normalizer": "softpik"}, "'softpik' is unknown"),
    ],
)
def test_a_configuration_that_cannot_be_run_is_refused(tmp_path, changes, words):
    with pytest.raises(CheckpointError, match=words):
        find(str(write(tmp_path / "c", {**CONFIG, **changes})))


def test_without_attn_impl_softmax_must_be_stated(tmp_path):
    config = {key: value for key, value in CONFIG.items() if key != "attn_impl"}
    folder = str(write(tmp_path / "c", config))
    with pytest.raises(CheckpointError, match=r"has no attn_impl.*put normalizer: softmax"):
        find(folder)
    with pytest.raises(CheckpointError, match="has no attn_impl"):
        find(folder, normalizer="softpick")
    assert find(folder, normalizer="softmax").normalizer == "softmax"
    write(tmp_path / "c", {**config, "qbench_normalizer": "softpick"})
    assert find(folder).normalizer == "softpick"


@pytest.mark.parametrize("quantized", [False, True])
def test_a_folder_of_gguf_files_needs_the_name_of_one(tmp_path, quantized):
    (tmp_path / "q4.gguf").touch()
    with pytest.raises(CheckpointError, match=r"no config.json there; name .*, or the GGUF file"):
        find(str(tmp_path), quantized=quantized)


def test_a_folder_has_no_revision(tmp_path):
    with pytest.raises(CheckpointError, match=r"a folder has no revisions.*revision: v1"):
        find(str(write(tmp_path / "c")), revision="v1")


@pytest.mark.parametrize(
    ("names", "command"),
    [
        (["pytorch_model"], r"save_file\(.*load\('pytorch_model\.bin'.*'model\.safetensors'"),
        (["model-1", "model-2"], r"from_pretrained\('\.', .*save_pretrained\('\.'\)"),
    ],
)
def test_pickles_are_refused_with_the_way_to_convert_them(tmp_path, names, command):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for name in names:
        torch.save({}, tmp_path / f"{name}.bin")
    with pytest.raises(CheckpointError, match=rf"pickles .*in that folder: python -c .*{command}"):
        find(str(tmp_path))


DEMO = Path(__file__).parents[2] / "recipes" / "demo" / "softpick"
STOCK = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 32,
    "num_hidden_layers": 1, "max_position_embeddings": 128,
}  # fmt: skip
SOURCES = {
    "NUL byte": "a\0b",
    "endless": "x/" * 3000 + "y",
    "somebody's home": "~nobody-there/checkpoint",
    "lone surrogate": "folder-\udcff",
}
CONFIGS = {
    "nested": "[" * 100_000, "no JSON": "{", "no object": "[]", "no UTF-8": b"\xff\xfe{}",
    "no model_type": "{}",
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_source_that_cannot_be_a_checkpoint_is_refused_in_one_printable_line(source):
    with pytest.raises(CheckpointError) as refusal:
        find(source)
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 700


@pytest.mark.parametrize("content", CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_is_no_object_of_a_model_is_refused(tmp_path, content):
    path = write(tmp_path / "c") / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=r"config\.json"):
        find(str(tmp_path / "c"))


@pytest.mark.parametrize("config", [CONFIG, STOCK], ids=["fla", "stock"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**9), ("num_hidden_layers", "12"), ("hidden_size", -64),
        ("num_attention_heads", True), ("max_position_embeddings", "long"),
    ],
)  # fmt: skip
@pytest.mark.timeout(20)
def test_a_size_that_is_none_is_refused(tmp_path, config, field, value):
    with pytest.raises(CheckpointError, match=field):
        find(str(write(tmp_path / "c", {**config, field: value})))


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: "",
        lambda whole: "[" * 100_000,
        lambda whole: whole[:5000],
        lambda whole: whole.replace('"merges"', '"no_merges"'),
    ],
    ids=["empty", "nested", "cut short", "no merges"],
)
def test_a_tokenizer_that_cannot_be_read_is_one_line(tmp_path, change):
    folder = write(tmp_path / "c")
    (folder / "tokenizer.json").write_text(change((DEMO / "tokenizer.json").read_text()))
    checkpoint = find(str(folder))
    with pytest.raises(CheckpointError, match="no usable tokenizer") as error:
        load_tokenizer(checkpoint)
    assert len(str(error.value).splitlines()) == 1


def test_how_a_tokenizer_writes_what_cuts_nothing_is_no_difference(tmp_path):
    """As libraries that saved it at other times do; no word or merge differs."""
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    rules = json.loads((DEMO / "tokenizer.json").read_text())
    rules["model"] |= {"continuing_subword_prefix": "", "fuse_unk": True}
    (first / "tokenizer.json").write_text((DEMO / "tokenizer.json").read_text())
    (second / "tokenizer.json").write_text(json.dumps(rules))
    assert tokenizer_difference(find(str(second)), find(str(first))) is None


# A tokenizer that transformers reads from a GGUF file is compared with the file.


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


def without_merges(tokenizer):
    """As transformers 5.17 reads Gemma's from GGUF: words are split into short pieces."""
    split = copy.copy(tokenizer)
    split.encode = lambda text, **options: [
        i for letter in text for i in tokenizer.encode(letter, **options)
    ]
    return split


def asks(value):
    return SimpleNamespace(contents=lambda: value)


def test_a_tokenizer_that_splits_its_own_entries_or_leaves_bos_out_is_named(tokenizer):
    assert tokenizer_problem(tokenizer, None) is None
    assert tokenizer_problem(tokenizer, asks(False)) is None
    assert "encode to one token again" in tokenizer_problem(without_merges(tokenizer), None)
    begins = tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
    assert begins or "without BOS" in tokenizer_problem(tokenizer, asks(True))
