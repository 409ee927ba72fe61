"""The recipes in search of sinks: BOS is the first token wherever a first token is looked at."""

from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from qbench.training import loop
from qbench.training.tokenize import Tokenizing, begin_with, tokenize

RECIPES = Path(__file__).parents[2] / "recipes" / "train"
BOS = 1  # of the small tokenizer


@pytest.fixture(scope="module")
def tokens_without_bos(tmp_path_factory, tokenizer_folder, texts):
    folder = tmp_path_factory.mktemp("without-bos")
    (folder / "text.txt").write_text("\0".join(texts), encoding="utf-8")
    tokenize(
        [str(folder / "text.txt")], folder / "tokens", tokenizer=str(tokenizer_folder),
        settings=Tokenizing(held_out=200, bos=False),
    )  # fmt: skip
    return folder / "tokens"


def in_small(name, tokens):
    """What the shipped recipe says, of a model that takes seconds."""
    shipped = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    return {
        **shipped,
        "model": {"hidden": 32, "layers": 1, "heads": 2, "vocabulary": 64, "context": 16},
        "normalizers": ["softmax"],
        "data": {**shipped["data"], "tokens": str(tokens)},
        "tokens": 128 * 2,
        "batch": {"tokens": 128, "sequences": 4},
        "compute": {"precision": "float32", "compile": False},
        "watch": {"every": 1, "samples": 3, "length": 16},
    }


def test_bos_is_first_in_training_and_in_the_watch(
    tmp_path, monkeypatch, train, tokens_without_bos
):
    trained_on, watched = [], []
    batches, look = loop.dataloader, loop.evaluate

    def fed(*arguments, **options):
        for batch in batches(*arguments, **options):
            trained_on.append(batch)
            yield batch

    def looked(model, ids, *rest):
        watched.append(ids)
        return look(model, ids, *rest)

    monkeypatch.setattr(loop, "dataloader", fed)
    monkeypatch.setattr(loop, "evaluate", looked)
    [record] = train(tmp_path, **in_small("sinks-27m", tokens_without_bos))
    assert record.settings["optimizer"]["weight_decay"] == 0.5
    assert len(watched) == 3
    for rows in (*trained_on, *watched):
        assert (rows[:, 0] == BOS).all()
        assert (rows[:, 1:] != BOS).all()
    assert torch.cat(trained_on).shape == (16, 17)


def test_a_checkpoint_whose_sequences_began_with_bos_begins_texts_with_it(
    tmp_path, train, tokens_without_bos
):
    train(tmp_path, **in_small("sinks-27m", tokens_without_bos))
    trained = tmp_path / "softmax-seed0"
    tokenizer = AutoTokenizer.from_pretrained(trained)
    text = "a and b"
    bare = tokenizer.encode(text, add_special_tokens=False)
    assert BOS not in bare
    assert tokenizer.encode(text) == [BOS, *bare]
    assert tokenizer.encode(text, text) == [BOS, *bare, BOS, *bare]
    before = (trained / "tokenizer.json").read_bytes()
    begin_with(BOS, trained)
    assert (trained / "tokenizer.json").read_bytes() == before
