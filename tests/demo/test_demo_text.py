"""The demo's text: the same from the same seed, held out as it claims, and well formed."""

import json
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def training(made):
    from corpus import held_out_triples, make_training

    world, evaluation, _ = made
    return make_training(world, 0, held_out_triples(evaluation), 3_000)


def test_the_command_writes_the_committed_bytes_in_a_process_of_its_own(demo, tmp_path):
    command = [sys.executable, demo / "make.py", "--seed", "0", "--out", tmp_path]
    subprocess.run(command, check=True, env={"PYTHONHASHSEED": "77"})
    written = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*.jsonl"))
    assert len(written) == 4
    for name in written:
        assert (tmp_path / name).read_bytes() == (demo / name).read_bytes(), name


def test_no_three_sentences_of_an_evaluation_document_stand_in_other_text(made, training):
    from corpus import held_out_triples, sentence_triples

    _, evaluation, calibration = made
    held_out = held_out_triples(evaluation)
    assert len(held_out) > 1_000
    for text in [*training, *(row["text"] for row in calibration)]:
        assert held_out.isdisjoint(sentence_triples(text))


# The demo's pair: its on-disk format, alike in all but the normalizer, and far above chance.


PAIR = {"softmax": "parallel_attn", "softpick": "parallel_softpick_attn"}


@pytest.mark.parametrize("file", ["config.json", "training.json"])
def test_the_pair_differs_only_in_its_attention(demo, file):
    first, second = (json.loads((demo / name / file).read_text()) for name in PAIR)
    different = {key for key in {*first, *second} if first.get(key) != second.get(key)}
    assert different == {"config.json": {"attn_impl"}, "training.json": {"attention", "loss"}}[file]
