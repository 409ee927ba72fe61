"""A tokenizer that transformers reads from a GGUF file is compared with the file."""

import copy
from types import SimpleNamespace

import pytest
from small_recipe import DEMO
from transformers import AutoTokenizer

from qbench.checkpoints.from_gguf import tokenizer_problem


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO / "softmax")


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
    assert "tokens are one token again" in tokenizer_problem(without_merges(tokenizer), None)
    begins = tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
    assert begins or "without BOS" in tokenizer_problem(tokenizer, asks(True))
