"""The demo's text: the same from the same seed, held out as it claims, and well formed."""

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
