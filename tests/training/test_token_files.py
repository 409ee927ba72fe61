"""Token files: what is read, written, held out, left out and noticed when it changes."""

import json
import shutil

import numpy as np
import pytest

from qbench.errors import DataError, OutputError, RecipeError
from qbench.training.data import (
    documents,
    evaluation_ngrams,
    read_token_files,
    require_source,
    tokenize,
    without_shared,
)

TEXTS = ["the cat sat", "a mat\nand dogs", "never come back"]


def separated(folder):
    path = folder / "a.txt"
    path.write_text("\0".join(TEXTS) + "\0", encoding="utf-8")
    return path


def lines(folder):
    path = folder / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS), encoding="utf-8")
    return path


def parquet(folder):
    import pyarrow
    from pyarrow import parquet as files

    path = folder / "a.parquet"
    files.write_table(pyarrow.table({"text": [*TEXTS, None], "id": range(4)}), path)
    return path


@pytest.mark.parametrize("make", [separated, lines, parquet])
def test_every_kind_of_file_gives_its_documents(tmp_path, make):
    assert list(documents(str(make(tmp_path)))) == TEXTS


def test_documents_longer_than_a_chunk_stay_whole(tmp_path):
    long = "word " * 500_000
    path = tmp_path / "long.txt"
    path.write_text(f"short\0{long}\0end", encoding="utf-8")
    assert list(documents(str(path))) == ["short", long, "end"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"body": "y"}', "a.jsonl:2: no text in the field 'text', but"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', "a.jsonl:2: not a JSON object"),
        ("a.txt", b"\xff\xfe", "cannot be read ("),
        ("a.parquet", b"no parquet", "cannot be read ("),
    ],
)  # fmt: skip
def test_what_is_malformed_is_named_with_its_place(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        list(documents(str(tmp_path / name)))
    assert words in str(error.value)


@pytest.mark.parametrize("name", ["a.csv", "a.txt.gz", "nowhere.txt", "hf://datasets/only"])
def test_a_source_that_is_none_is_refused_before_work_begins(tmp_path, name):
    for file in ("a.csv", "a.txt.gz"):
        (tmp_path / file).write_text("x")
    source = name if name.startswith("hf:") else str(tmp_path / name)
    with pytest.raises((DataError, RecipeError)):
        require_source(source)


def test_each_document_is_bos_text_eos_and_some_are_held_out(tokens, texts, tokenizer_folder):
    from transformers import PreTrainedTokenizerFast

    files = read_token_files(tokens)
    encode = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    ids = [[1, *encode(text)["input_ids"], 2] for text in texts]
    held = [i for i in range(len(texts)) if i % 50 == 0][: files.about.held_out.documents]
    assert files.held_out.tolist() == [t for i in held for t in ids[i]]
    assert files.train.tolist() == [t for i, row in enumerate(ids) if i not in held for t in row]
    assert (files.about.train.documents, files.about.dtype) == (len(texts) - len(held), "uint16")
    assert files.train.dtype == np.uint16
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tokens / name).read_bytes() == (tokenizer_folder / name).read_bytes()


@pytest.mark.parametrize("name", ["train.bin", "held_out.bin", "tokenizer.json"])
def test_a_changed_byte_is_noticed(tmp_path, tokens, name):
    copy = tmp_path / "copy"
    shutil.copytree(tokens, copy)
    payload = bytearray((copy / name).read_bytes())
    payload[10] ^= 1
    (copy / name).write_bytes(payload)
    with pytest.raises(DataError, match="tokenize again"):
        read_token_files(copy)


def test_a_folder_that_is_there_is_not_written_into(tmp_path, tokens):
    with pytest.raises(RecipeError, match="exists already"):
        tokenize([str(separated(tmp_path))], tokens, tokenizer=str(tokens))


WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (f"fine\nOne, two {WORDS[8:]} and more\nfine too", "fine\nfine too"),
        (WORDS.upper(), None),
        (WORDS.replace(" ", "\n"), None),  # hard-wrapped
        (f"before\n{WORDS[:40]}\n{WORDS[40:]}\nafter", "before\nafter"),
        (WORDS.rsplit(" ", 2)[0], WORDS.rsplit(" ", 2)[0]),  # twelve words
    ],
)
def test_lines_that_share_thirteen_words_with_an_evaluation_text_are_left_out(tmp_path, text, kept):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "test.jsonl").write_text(json.dumps({"q": {"parts": [f"So: {WORDS}."]}}))
    left, count = without_shared(text, evaluation_ngrams(tmp_path))
    assert left == (kept or "")
    assert count == text.count("\n") - (kept or "").count("\n") + (kept is None)


def test_special_tokens_written_in_a_text_are_text(tmp_path, tokenizer_folder):
    (tmp_path / "a.txt").write_text("\0".join(["the cat </s> sat <s> on"] * 60))
    about = tokenize([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer=str(tokenizer_folder))
    files = read_token_files(tmp_path / "out")
    for ids in (files.train, files.held_out):
        documents = len(ids) / (about.train.tokens / about.train.documents)
        assert (ids == about.bos).sum() == (ids == about.eos).sum() == documents


def test_ids_may_have_gaps(tmp_path, tokenizer_folder):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["vocab"]["cat"] = 70_000
    (folder / "tokenizer.json").write_text(json.dumps(values))
    source = separated(tmp_path)
    about = tokenize([str(source)], tmp_path / "out", tokenizer=str(folder))
    assert (about.vocabulary, about.dtype) == (70_001, "uint32")
    files = read_token_files(tmp_path / "out")
    assert 70_000 in [*files.train, *files.held_out]


def test_a_tokenizer_without_tokenizer_json_is_refused(tmp_path):
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "vocab.txt").write_text("[UNK]\nthe\ncat")
    with pytest.raises(DataError, match=r"slow: it has no tokenizer\.json; write one with"):
        tokenize([str(separated(tmp_path))], tmp_path / "out", tokenizer=str(tmp_path / "slow"))


def test_a_tokenizer_may_be_learnt_from_the_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\0".join([*TEXTS * 30, "numbers 1234"]), encoding="utf-8")
    about = tokenize([str(path)], tmp_path / "out", tokenizer=300)
    assert about.vocabulary <= 300
    assert (about.bos, about.eos, about.pad) == (1, 2, 3)
    again = tokenize([str(path)], tmp_path / "again", tokenizer=300)
    assert again.digest == about.digest


def test_no_source_is_read_once_there_are_enough_tokens(tmp_path, tokenizer_folder):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("\0".join(["the cat sat"] * 60))
    about = tokenize(
        [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], tmp_path / "out",
        tokenizer=str(tokenizer_folder), most_tokens=100,
    )  # fmt: skip
    assert [source.name for source in about.sources] == ["a.txt"]
    longest = about.train.tokens // about.train.documents
    assert 100 <= about.train.tokens < 100 + longest


def test_plain_text_without_zero_bytes_is_one_document(tmp_path, tokenizer_folder, monkeypatch):
    path = tmp_path / "book.txt"
    path.write_text("the cat sat\n" * 60)
    with pytest.raises(DataError, match=r"beside those held out.*put zero bytes between the doc"):
        tokenize([str(path)], tmp_path / "out", tokenizer=str(tokenizer_folder))
    monkeypatch.setattr("qbench.training.data.HELD_OUT", 100)  # fewer than the book has
    about = tokenize([str(path)], tmp_path / "out", tokenizer=str(tokenizer_folder))
    assert (about.train.documents, about.held_out.documents) == (1, 0)


def test_a_full_disk_is_told_in_a_line(tmp_path, tokenizer_folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qbench.training.data._encoded", full)
    source, out = separated(tmp_path), tmp_path / "out"
    with pytest.raises(OutputError, match=r"out: cannot be written \(No space left on device\)"):
        tokenize([str(source)], out, tokenizer=str(tokenizer_folder))
    assert sorted(tmp_path.iterdir()) == [source]
