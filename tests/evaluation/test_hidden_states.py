"""The file of hidden states that divergence from the unquantized model rests on."""

import os

import numpy as np
import pytest
import torch
from scoring_models import choices, llama, recorded, watch

from qbench.errors import ResultsError
from qbench.evaluation.kl_observer import BaselineHiddenStates, BaselineWriter
from qbench.store import baseline_file, baseline_files, head_key, task_key, verify_baseline

PARTS = {"weights": "w", "tasks": {"choices": "1", "a": "2", "b": "3"},
         "few-shot": {"choices": 0, "a": 0, "b": 0}, "scoring": {}}  # fmt: skip
KEY = task_key(PARTS, "choices")


def usable(path, key=KEY):
    try:
        verify_baseline(path, key)
    except ResultsError as error:
        return "the unquantized cell is then made anew" not in str(error)
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_hidden_states_come_back_from_their_file(tmp_path, dtype):
    model, writer = llama(dtype=dtype), BaselineWriter()
    for task, count in (("a", 5), ("b", 3)):
        watch(model, writer, choices(count, task=task))
        base = writer.hidden_states()
        base.save(tmp_path, PARTS, task)
    files = baseline_files(tmp_path, PARTS, ("a", "b"))
    assert all(usable(path, key) for path, key in files.items())
    back = BaselineHiddenStates.load(tmp_path, PARTS, ("a", "b"))
    assert list(back.tasks) == ["a", "b"]
    for task, states in base.tasks.items():
        for loaded, saved in zip(back.tasks[task], states, strict=True):
            assert loaded is saved is None or torch.equal(loaded, saved)
    assert torch.equal(back.weight, model.lm_head.weight)
    assert back.bias is None
    width = model.config.hidden_size * dtype.itemsize
    path = baseline_file(tmp_path, task_key(PARTS, "a"))
    assert path.stat().st_size < len(base.tasks["a"].token) * (width + 12) + 5_000
    head = baseline_file(tmp_path, head_key(PARTS))
    assert head.stat().st_size < model.config.vocab_size * width + 5_000
    assert path.stat().st_mode == path.with_name(f"{path.name}.digest").stat().st_mode


def test_a_task_that_generates_has_an_empty_file_and_a_later_one_brings_the_head(tmp_path):
    BaselineWriter().hidden_states().save(tmp_path, PARTS, "a")
    assert all(usable(*one) for one in baseline_files(tmp_path, PARTS, ["a"]).items())
    assert BaselineHiddenStates.load(tmp_path, PARTS, ["a"]).tasks == {}
    model, writer = llama(), BaselineWriter()
    watch(model, writer, choices(3, task="b"))
    writer.hidden_states().save(tmp_path, PARTS, "b")
    back = BaselineHiddenStates.load(tmp_path, PARTS, ("a", "b"))
    assert list(back.tasks) == ["b"]
    assert torch.equal(back.weight, model.lm_head.weight)


def test_one_changed_byte_anywhere_makes_the_file_unusable(tmp_path):
    path = baseline_file(tmp_path, KEY)
    recorded(llama(), choices(3)).save(tmp_path, PARTS, "choices")
    payload = path.read_bytes()
    for index in [*np.random.default_rng(0).integers(0, len(payload), 20).tolist(), 0, 9]:
        changed = bytearray(payload)
        changed[index] ^= 1 << (index % 8)
        path.write_bytes(changed)
        assert not usable(path)
    path.write_bytes(payload)
    assert usable(path)


@pytest.mark.parametrize("damage", ["short", "absent", "other", "no checksum"])
def test_a_file_that_is_not_the_cells_says_what_to_do(tmp_path, damage):
    path, key = baseline_file(tmp_path, KEY), KEY
    recorded(llama(), choices(3)).save(tmp_path, PARTS, "choices")
    if damage == "short":
        os.truncate(path, path.stat().st_size - 1)
    elif damage == "absent":
        path.unlink()
    elif damage == "no checksum":
        path.with_name(path.name + ".digest").unlink()
    else:
        key = KEY[:16] + "f" * 48
    assert not usable(path, key)
