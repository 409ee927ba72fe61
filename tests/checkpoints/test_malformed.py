"""Malformed checkpoints and sources: one line and exit code 2, within seconds."""

import json
from pathlib import Path

import pytest
from checkpoints.folders import CONFIG, write

from qbench.checkpoints import find
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.errors import CheckpointError

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
    "nested": "[" * 100_000,
    "no JSON": "{",
    "no object": "[]",
    "no UTF-8": b"\xff\xfe{}",
    "no model_type": "{}",
}


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
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", "12"),
        ("hidden_size", -64),
        ("num_attention_heads", True),
        ("max_position_embeddings", "long"),
    ],
)
@pytest.mark.timeout(20)
def test_a_size_that_is_none_is_refused(tmp_path, config, field, value):
    with pytest.raises(CheckpointError, match=field):
        find(str(write(tmp_path / "c", {**config, field: value})))


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: "",
        lambda whole: "[]",
        lambda whole: "[" * 100_000,
        lambda whole: whole[:5000],
        lambda whole: json.dumps({k: v for k, v in json.loads(whole).items() if k != "model"}),
        lambda whole: whole.replace('"merges"', '"no_merges"'),
    ],
    ids=["empty", "list", "nested", "cut short", "no model", "no merges"],
)
def test_a_tokenizer_that_cannot_be_read_is_one_line(tmp_path, change):
    folder = write(tmp_path / "c")
    (folder / "tokenizer.json").write_text(change((DEMO / "tokenizer.json").read_text()))
    checkpoint = find(str(folder))
    with pytest.raises(CheckpointError, match="no usable tokenizer") as error:
        load_tokenizer(checkpoint)
    assert len(str(error.value).splitlines()) == 1
