"""Quantized weights on disk: reused, told apart, checked, and made by one process at a time."""

import copy
import gzip
import json
import multiprocessing
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quantizer_models import DIGEST, calibration, logits, make, make_with_detail, settings
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qbench.errors import DataError, OutputError
from qbench.files import file_digest, temporary, write_tensors
from qbench.quantizers.calibration import read_calibration
from qbench.quantizers.quantize import Artifact
from qbench.quantizers.texts import CalibrationText


def path_of(root, chosen, seed=1, **more):
    options = {
        "original": DIGEST,
        "attention": "qbench-softmax-reference",
        "normalizer_source": None,
        "device": torch.device("cpu"),
        "calibration": calibration(seed) if chosen.needs_calibration else None,
    }
    return Artifact(root, config=chosen, **options | more).path


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bnb-4bit", {"double_quant": True, "compute_dtype": "bfloat16"}),
        ("bnb-8bit", {}),
        ("hqq-3bit", {}),
        ("rtn-2bit", {"compute_dtype": "bfloat16"}),
        ("gptq-3bit", {"desc_act": True}),
    ],
)
def test_what_is_read_again_scores_the_same_to_the_bit(name, options, tmp_path):
    chosen = settings(name, **options)
    first, made = make_with_detail(chosen, tmp_path)
    second, reused = make_with_detail(chosen, tmp_path)
    assert "reused" not in made
    assert reused == f"artifact reused: {made}"
    assert torch.equal(logits(first), logits(second))


def test_all_that_can_change_the_weights_makes_another_artifact(tmp_path):
    chosen = settings("gptq-4bit")
    paths = {
        path_of(tmp_path, chosen),
        path_of(tmp_path, chosen, seed=2),
        path_of(tmp_path, chosen, original="f" * 64),
        *(
            path_of(tmp_path, replace(chosen, weights=replace(chosen.weights, **{name: value})))
            for name, value in {
                "num_bits": 3, "group_size": 16, "symmetric": False, "desc_act": True, "damp": 0.02,
                "compute_dtype": "bfloat16", "ignore": ("o_proj",),
            }.items()
        ),
        path_of(tmp_path, chosen, attention="qbench-softpick-reference"),
        path_of(tmp_path, chosen, normalizer_source="a" * 64),
        path_of(tmp_path, chosen, normalizer_source="b" * 64),
        path_of(tmp_path, chosen, device=torch.device("meta")),
    }  # fmt: skip
    assert len(paths) == 14


def test_what_cannot_be_kept_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qbench.files.save_tensors", full)
    with pytest.raises(OutputError, match=r"are not kept: .*\(No space left.*QBENCH_CACHE"):
        make(settings("rtn-4bit"), tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(
    "harm",
    [
        lambda at: at.write_bytes(at.read_bytes()[:-1] + bytes([at.read_bytes()[-1] ^ 1])),
        lambda at: at.with_name(f"{at.name}.digest").unlink(),
        lambda at: at.write_bytes(at.read_bytes()[:-9]),
        lambda at: write_tensors(at, {"x": torch.ones(1)}, {"key": "0", "note": ""}),
    ],
    ids=["byte", "no digest", "half", "another key"],
)
def test_a_damaged_artifact_is_noticed_reported_and_made_again(harm, tmp_path):
    chosen = settings("rtn-4bit")
    first = make(chosen, tmp_path)
    harm(path_of(tmp_path, chosen))
    second, detail = make_with_detail(chosen, tmp_path)
    assert detail.startswith("artifact was damaged (")
    assert torch.equal(logits(first), logits(second))
    assert "reused" in make_with_detail(chosen, tmp_path)[1]


def test_what_a_killed_process_left_half_made_is_no_artifact_and_is_removed(tmp_path):
    chosen = settings("rtn-4bit")
    at = path_of(tmp_path, chosen)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    unfinished = temporary(at)
    name = unfinished.name.replace(f".{os.getpid()}.", f".{dead.pid}.")
    other = tmp_path / "another checkpoint" / name
    for half in (unfinished, other):
        half.parent.mkdir(parents=True, exist_ok=True)
        half.write_bytes(b"half")
    assert make_with_detail(chosen, tmp_path)[1] == "round to nearest"
    assert not unfinished.exists()
    assert not other.exists()


def _make(root, start, details):
    start.wait(20)
    details.put(make_with_detail(settings("hqq-2bit"), Path(root))[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_processes_quantize_the_same_once(tmp_path):
    context = multiprocessing.get_context("fork")
    start, details = context.Event(), context.Queue()
    both = [context.Process(target=_make, args=(str(tmp_path), start, details)) for _ in range(2)]
    for process in both:
        process.start()
    start.set()
    actual = sorted(details.get(timeout=60) for _ in both)
    for process in both:
        process.join()
    assert actual == ["artifact reused: hqq", "hqq"]


# Calibration text: which tokens, and what is refused.


WORDS = [f"w{i}" for i in range(200)]


def read_text(path, tokenizer, samples, length, seed, **more):
    digest = file_digest(path) if path.is_file() else ""
    text = {"path": path, "digest": digest, "samples": samples, "length": length, "seed": seed}
    return read_calibration(CalibrationText(**text, **more), tokenizer)


@pytest.fixture(scope="module")
def tokenizer():
    """A word a token: w7 is 7; </s> is 200."""
    vocabulary = {word: i for i, word in enumerate([*WORDS, "</s>"])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


def write_text(path, lengths):
    """Document d counts up from w(10·d)."""
    lines = [
        json.dumps({"text": " ".join(WORDS[10 * d : 10 * d + n])}) for d, n in enumerate(lengths)
    ]
    path.write_text("\n".join(lines) + "\n\n")
    return path


def test_a_long_document_gives_one_window_of_its_own(tmp_path, tokenizer):
    path = write_text(tmp_path / "c.jsonl", [10, 10, 10, 10])
    actual = read_text(path, tokenizer, 4, 6, 0)
    assert actual.ids.shape == (4, 6)
    for row in actual.ids.tolist():
        assert row == list(range(row[0], row[0] + 6))
    assert sorted(row[0] // 10 for row in actual.ids.tolist()) == [0, 1, 2, 3]


def test_short_documents_are_joined_with_the_end_of_text_between(tmp_path, tokenizer):
    path = write_text(tmp_path / "c.jsonl", [3, 3, 3, 3])
    rows = read_text(path, tokenizer, 2, 7, 0).ids.tolist()
    assert all(row[3] == 200 for row in rows)
    assert all(row[:3] == list(range(row[0], row[0] + 3)) for row in rows)


def test_each_window_begins_with_bos_where_it_is_asked_for(tmp_path, tokenizer):
    path = write_text(tmp_path / "c.jsonl", [10, 10, 10, 3, 3])
    with pytest.raises(DataError, match="the tokenizer has none"):
        read_text(path, tokenizer, 3, 7, 0, bos=True)
    with_bos = copy.deepcopy(tokenizer)
    with_bos.add_special_tokens({"bos_token": "<s>"})
    actual = read_text(path, with_bos, 3, 7, 0, bos=True)
    assert actual.ids.shape == (3, 7)
    assert actual.ids[:, 0].tolist() == [with_bos.bos_token_id] * 3
    assert not (actual.ids[:, 1:] == with_bos.bos_token_id).any()
    without = read_text(path, with_bos, 3, 6, 0)
    assert actual.ids[:, 1:].tolist() == without.ids.tolist()
    assert actual.digest != without.digest


def test_the_seed_decides_and_decides_alone(tmp_path, tokenizer):
    path = write_text(tmp_path / "c.jsonl", [10] * 12)
    first, again = (read_text(path, tokenizer, 5, 4, 3) for _ in range(2))
    other = read_text(path, tokenizer, 5, 4, 4)
    assert torch.equal(first.ids, again.ids)
    assert first.digest == again.digest != other.digest


def test_a_gzipped_file_gives_the_windows_of_the_plain_one(tmp_path, tokenizer):
    plain = write_text(tmp_path / "c.jsonl", [10, 10, 10])
    packed = tmp_path / "c.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    actual = [read_text(path, tokenizer, 3, 6, 0).digest for path in (plain, packed)]
    assert actual[0] == actual[1]


def test_a_line_separator_inside_a_text_does_not_end_its_line(tmp_path, tokenizer):
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "w1 w2\u2028w3 w4"}\n', encoding="utf-8")
    assert read_text(path, tokenizer, 1, 4, 0).ids.tolist() == [[1, 2, 3, 4]]
