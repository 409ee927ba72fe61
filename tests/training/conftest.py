"""A small training: token files of made-up text, and a recipe that takes seconds on a CPU."""

import json
import random
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SENTENCE = "the cat sat on a mat while dogs run far away and never come back again"
WORDS = SENTENCE.split()
VOCABULARY = 64
RECIPE = {
    "name": "small",
    "model": {"hidden": 16, "layers": 2, "heads": 2, "vocabulary": VOCABULARY, "context": 16},
    "normalizers": ["softmax", "softpick"], "seeds": [3], "data": {"tokens": "tokens"},
    "tokens": 2560, "batch": {"tokens": 64, "sequences": 2},
    "optimizer": {"learning_rate": 3e-3, "eps": 1e-15}, "schedule": {"warmup_steps": 5},
    "compute": {"precision": "float32", "compile": False},
    "watch": {"every": 10, "samples": 4, "length": 16}, "log_every": 5, "save_every": 10,
}  # fmt: skip


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    trainer = trainers.WordLevelTrainer(special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    named["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


@pytest.fixture(scope="session")
def texts():
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(20, 60))) for _ in range(300)]


@pytest.fixture(scope="session")
def tokens(tmp_path_factory, tokenizer_folder, texts):
    """A folder of token files."""
    from qbench.training.data import tokenize

    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("\0".join(texts), encoding="utf-8")
    tokenize([str(folder / "text.txt")], folder / "tokens", tokenizer=str(tokenizer_folder))
    return folder / "tokens"


def write_recipe(path, tokens, /, **changed):
    """The small recipe, with parts of it changed."""
    values = {**RECIPE, "data": {"tokens": str(tokens)}}
    for name, value in changed.items():
        default = values.get(name)
        values[name] = {**default, **value} if isinstance(default, dict) else value
    path.write_text(yaml.safe_dump(values))
    return path


def run_recipe(path, out, *, stop_after=None, log=[].append):
    """Trains in this process; returns the records of the finished runs."""
    from qbench.training.data import read_token_files
    from qbench.training.loop import joined, train_recipe
    from qbench.training.training_recipe import TrainingRecipe

    recipe = TrainingRecipe.load(path)
    files = read_token_files(Path(recipe.data.tokens))
    with joined("cpu") as processes:
        return train_recipe(recipe, files, out, processes=processes, log=log, stop_after=stop_after)


@pytest.fixture(scope="session")
def trained(tmp_path_factory, tokens):
    """The small recipe's pair, trained in one go: its folder, and the records."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, run_recipe(write_recipe(folder / "recipe.yaml", tokens), folder)


@pytest.fixture
def recipe_file(tmp_path, tokens):
    return lambda **changed: write_recipe(tmp_path / "recipe.yaml", tokens, **changed)


@pytest.fixture
def train(recipe_file):
    def run(out, *, stop_after=None, log=[].append, **changed):
        return run_recipe(recipe_file(**changed), out, stop_after=stop_after, log=log)

    return run
