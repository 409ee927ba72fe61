"""Calibration text: which tokens, and what is refused."""

import copy
import gzip
import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qbench.errors import DataError
from qbench.files import file_digest
from qbench.quantizers.calibration import read_calibration
from qbench.quantizers.texts import CalibrationText

WORDS = [f"w{i}" for i in range(200)]


def read(path, tokenizer, samples, length, seed, *, bos=False):
    digest = file_digest(path) if path.is_file() else ""
    return read_calibration(
        CalibrationText(
            path=path, digest=digest, samples=samples, length=length, seed=seed, bos=bos
        ),
        tokenizer,
    )


@pytest.fixture(scope="module")
def tokenizer():
    """A word a token: w7 is 7; </s> is 200."""
    vocabulary = {word: i for i, word in enumerate([*WORDS, "</s>"])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


def write(path, lengths):
    """Document d counts up from w(10·d)."""
    lines = [
        json.dumps({"text": " ".join(WORDS[10 * d : 10 * d + n])}) for d, n in enumerate(lengths)
    ]
    path.write_text("\n".join(lines) + "\n\n")
    return path


def test_a_long_document_gives_one_window_of_its_own(tmp_path, tokenizer):
    path = write(tmp_path / "c.jsonl", [10, 10, 10, 10])
    found = read(path, tokenizer, 4, 6, 0)
    assert found.ids.shape == (4, 6)
    for row in found.ids.tolist():
        assert row == list(range(row[0], row[0] + 6))
    assert sorted(row[0] // 10 for row in found.ids.tolist()) == [0, 1, 2, 3]


def test_short_documents_are_joined_with_the_end_of_text_between(tmp_path, tokenizer):
    path = write(tmp_path / "c.jsonl", [3, 3, 3, 3])
    rows = read(path, tokenizer, 2, 7, 0).ids.tolist()
    assert all(row[3] == 200 for row in rows)
    assert all(row[:3] == list(range(row[0], row[0] + 3)) for row in rows)


def test_each_window_begins_with_bos_where_it_is_asked_for(tmp_path, tokenizer):
    path = write(tmp_path / "c.jsonl", [10, 10, 10, 3, 3])
    with pytest.raises(DataError, match="the tokenizer has none"):
        read(path, tokenizer, 3, 7, 0, bos=True)
    with_bos = copy.deepcopy(tokenizer)
    with_bos.add_special_tokens({"bos_token": "<s>"})
    found = read(path, with_bos, 3, 7, 0, bos=True)
    assert found.ids.shape == (3, 7)
    assert found.ids[:, 0].tolist() == [with_bos.bos_token_id] * 3
    assert not (found.ids[:, 1:] == with_bos.bos_token_id).any()
    without = read(path, with_bos, 3, 6, 0)
    assert found.ids[:, 1:].tolist() == without.ids.tolist()
    assert found.digest != without.digest


def test_the_seed_decides_and_decides_alone(tmp_path, tokenizer):
    path = write(tmp_path / "c.jsonl", [10] * 12)
    first, again = (read(path, tokenizer, 5, 4, 3) for _ in range(2))
    other = read(path, tokenizer, 5, 4, 4)
    assert torch.equal(first.ids, again.ids)
    assert first.digest == again.digest != other.digest


def test_a_gzipped_file_gives_the_windows_of_the_plain_one(tmp_path, tokenizer):
    plain = write(tmp_path / "c.jsonl", [10, 10, 10])
    packed = tmp_path / "c.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    found = [read(path, tokenizer, 3, 6, 0).digest for path in (plain, packed)]
    assert found[0] == found[1]


def test_a_line_separator_inside_a_text_does_not_end_its_line(tmp_path, tokenizer):
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "w1 w2\u2028w3 w4"}\n', encoding="utf-8")
    assert read(path, tokenizer, 1, 4, 0).ids.tolist() == [[1, 2, 3, 4]]
