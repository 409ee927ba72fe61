"""The demo's text: the same from the same seed, held out as it claims, and well formed."""

import json
import subprocess
import sys

import pytest
from small_recipe import DEMO

sys.path.insert(0, str(DEMO))  # its modules lie beside its recipe, outside the package

from corpus import held_out_triples, make_data, make_training, sentence_triples


def test_the_command_writes_the_committed_bytes_in_a_process_of_its_own(tmp_path):
    command = [sys.executable, DEMO / "make.py", "--seed", "0", "--out", tmp_path]
    subprocess.run(command, check=True, env={"PYTHONHASHSEED": "77"})
    written = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*.jsonl"))
    assert len(written) == 4
    for name in written:
        assert (tmp_path / name).read_bytes() == (DEMO / name).read_bytes(), name


def test_no_three_sentences_of_an_evaluation_document_stand_in_other_text():
    world, evaluation, calibration = make_data(0)
    held_out = held_out_triples(evaluation)
    assert len(held_out) > 1_000
    training = make_training(world, 0, held_out, 3_000)
    for text in [*training, *(row["text"] for row in calibration)]:
        assert held_out.isdisjoint(sentence_triples(text))


@pytest.mark.parametrize(
    ("file", "differing"),
    [("config.json", {"attn_impl"}), ("training.json", {"attention", "loss"})],
)
def test_the_pair_differs_only_in_its_attention(file, differing):
    a, b = (json.loads((DEMO / name / file).read_text()) for name in ("softmax", "softpick"))
    assert {key for key in {*a, *b} if a.get(key) != b.get(key)} == differing
