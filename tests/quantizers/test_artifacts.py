"""Quantized weights on disk: reused, told apart, checked, and made by one process at a time."""

import multiprocessing
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quantizer_models import DIGEST, calibration, logits, make, make_with_detail, settings

from qbench.errors import OutputError
from qbench.files import temporary, write_tensors
from qbench.quantizers.quantize import Artifact


def path_of(root, chosen, seed=1, **more):
    stated = {
        "original": DIGEST,
        "attention": "qbench-softmax-reference",
        "normalizer_source": None,
        "device": torch.device("cpu"),
        "calibration": calibration(seed) if chosen.needs_calibration else None,
    }
    return Artifact(root, config=chosen, **stated | more).path


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("bnb-4bit", {"double_quant": True, "compute_dtype": "bfloat16"}),
        ("bnb-8bit", {}),
        ("hqq-3bit", {}),
        ("rtn-2bit", {"compute_dtype": "bfloat16"}),
        ("gptq-3bit", {"desc_act": True}),
    ],
)
def test_what_is_read_again_scores_the_same_to_the_bit(name, stated, tmp_path):
    chosen = settings(name, **stated)
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
                "num_bits": 3,
                "group_size": 16,
                "symmetric": False,
                "desc_act": True,
                "damp": 0.02,
                "compute_dtype": "bfloat16",
                "ignore": ("o_proj",),
            }.items()
        ),
        path_of(tmp_path, chosen, attention="qbench-softpick-reference"),
        path_of(tmp_path, chosen, normalizer_source="a" * 64),
        path_of(tmp_path, chosen, normalizer_source="b" * 64),
        path_of(tmp_path, chosen, device=torch.device("meta")),
    }
    assert len(paths) == 14


def test_what_cannot_be_kept_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OutputError, match=r"are not kept: .*\(No space left.*QBENCH_CACHE"):
        make(settings("rtn-4bit"), tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))


def test_an_artifact_is_read_once_for_its_digest_and_its_tensors(tmp_path, monkeypatch):
    chosen = settings("rtn-4bit")
    first = make(chosen, tmp_path)
    monkeypatch.setattr(os, "pread", None)  # reads files part by part, for a digest alone
    second, detail = make_with_detail(chosen, tmp_path)
    assert detail.startswith("artifact reused")
    assert torch.equal(logits(first), logits(second))


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "harm",
    [
        flip_a_byte,
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
    own = temporary(at)
    other = tmp_path / "another checkpoint" / own.name.replace(f".{os.getpid()}.", f".{dead.pid}.")
    for half in (own, other):
        half.parent.mkdir(parents=True, exist_ok=True)
        half.write_bytes(b"half")
    assert make_with_detail(chosen, tmp_path)[1] == "round to nearest"
    assert not own.exists()
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
    found = sorted(details.get(timeout=60) for _ in both)
    for process in both:
        process.join()
    assert found == ["artifact reused: hqq", "hqq"]
