"""``data.bos_first``: BOS is the first token wherever a first token is looked at."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from qbench.training.data import (
    begin_with,
    read_token_files,
    sequences,
    tokenize,
    tokenizer_digest,
    watched_rows,
)
from qbench.training.training_recipe import TrainingRecipe

BOS = 1  # of the small tokenizer


@pytest.fixture
def bare(tmp_path, tokenizer_folder, texts):
    """Token files whose documents have no BOS, and the part of a recipe that asks for them."""
    (tmp_path / "text.txt").write_text("\0".join(texts), encoding="utf-8")
    tokenize(
        [str(tmp_path / "text.txt")], tmp_path / "tokens", tokenizer=str(tokenizer_folder),
        bos=False,
    )  # fmt: skip
    return {"tokens": str(tmp_path / "tokens"), "bos_first": True}


def test_bos_is_first_in_training_and_in_the_watch(recipe_file, bare):
    recipe = TrainingRecipe.load(recipe_file(data=bare))
    files = read_token_files(Path(recipe.data.tokens))
    source = sequences(recipe, files)
    for rows in (source.rows(np.arange(len(source))), np.array(watched_rows(recipe, files))):
        assert (rows[:, 0] == BOS).all()
        assert (rows[:, 1:] != BOS).all()


@pytest.mark.parametrize("appends_eos", [False, True])
def test_a_checkpoint_whose_sequences_began_with_bos_begins_texts_with_it(
    tmp_path, train, bare, appends_eos
):
    """And does nothing else, whatever the tokenizer did before."""
    if appends_eos:
        path = Path(bare["tokens"]) / "tokenizer.json"
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", 2)]
        )
        tokenizer.save(str(path))
        about = path.with_name("tokens.json")
        values = json.loads(about.read_text())
        values["tokenizer_digest"] = tokenizer_digest(path.parent)
        about.write_text(json.dumps(values))
    train(tmp_path, normalizers=["softmax"], tokens=128, data=bare)
    trained = tmp_path / "softmax-seed3"
    tokenizer = AutoTokenizer.from_pretrained(trained)
    text = "a and b"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert BOS not in ids
    assert tokenizer.encode(text) == [BOS, *ids]
    assert tokenizer.encode(text, text) == [BOS, *ids, BOS, *ids]
    before = (trained / "tokenizer.json").read_bytes()
    begin_with(BOS, trained)
    assert (trained / "tokenizer.json").read_bytes() == before
