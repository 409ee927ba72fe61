"""The file of rows that divergence from the unquantized model rests on."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import sleep
from uuid import uuid4

import numpy as np
import pytest
import torch
from recorded_rows import KEY, recorded, watch
from scoring_models import choices, llama

from qbench.errors import ResultsError
from qbench.evaluation.base_file import base_rows_file, base_rows_usable
from qbench.evaluation.scoring import base_rows
from qbench.evaluation.scoring.base_rows import BaseRows, Recorder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_rows_come_back_from_their_file(tmp_path, dtype):
    model, recorder = llama(dtype=dtype), Recorder()
    for requests in (choices(5, task="a"), choices(3, seed=9, task="b")):
        watch(model, recorder, requests)
    path, base = base_rows_file(tmp_path / "new", KEY), recorder.base(KEY)
    assert not base_rows_usable(path, KEY)
    base.save(path)
    assert base_rows_usable(path, KEY)
    back = BaseRows.load(path, KEY)
    assert list(back.tasks) == ["a", "b"]
    for task, rows in base.tasks.items():
        for name in rows.__slots__:
            assert torch.equal(getattr(back.tasks[task], name), getattr(rows, name))
    assert torch.equal(back.weight, model.lm_head.weight)
    assert back.bias is None
    tokens = sum(len(rows.token) for rows in base.tasks.values())
    width = model.config.hidden_size * dtype.itemsize
    head = model.config.vocab_size * width
    kept = sorted(file for file in path.parent.iterdir() if file.suffix != ".lock")
    assert sum(file.stat().st_size for file in kept) < tokens * (width + 12) + head + 5_000
    assert [file.suffix for file in kept] == [".rows", ".rows", ".rows", ".safetensors", ".sha256"]
    assert path.stat().st_mode == path.with_name(f"{path.name}.sha256").stat().st_mode


def test_two_runs_that_keep_rows_of_one_cell_at_once_leave_a_file_with_its_own_checksum(
    tmp_path, monkeypatch
):
    """As into two results folders with one cache: one is held up before it writes its checksum."""
    path, reached, other_began = base_rows_file(tmp_path, KEY), Event(), Event()
    real = base_rows.write_checksum

    def held_up(*arguments):
        if not reached.is_set():
            reached.set()
            other_began.wait(10)
            sleep(0.5)
        real(*arguments)

    monkeypatch.setattr(base_rows, "write_checksum", held_up)
    monkeypatch.setattr(base_rows, "temporary", lambda of: of.with_name(f"{uuid4().hex}.making"))
    first, second = (recorded(llama(), choices(count)) for count in (3, 5))
    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(first.save, path)
        reached.wait(10)
        two = threads.submit(second.save, path)
        other_began.set()
        one.result()
        two.result()
    assert base_rows_usable(path, KEY)


def test_one_changed_byte_anywhere_makes_the_file_unusable(tmp_path):
    path = base_rows_file(tmp_path, KEY)
    recorded(llama(), choices(3)).save(path)
    payload = path.read_bytes()
    for index in [*np.random.default_rng(0).integers(0, len(payload), 40).tolist(), 0, 9]:
        changed = bytearray(payload)
        changed[index] ^= 1 << (index % 8)
        path.write_bytes(changed)
        assert not base_rows_usable(path, KEY)
    path.write_bytes(payload)
    assert base_rows_usable(path, KEY)


@pytest.mark.parametrize("damage", ["torn", "short", "absent", "other", "no checksum"])
def test_a_file_that_is_not_the_cells_says_what_to_do(tmp_path, damage):
    path, key = base_rows_file(tmp_path, KEY), KEY
    recorded(llama(), choices(3)).save(path)
    if damage == "torn":
        path.write_bytes(b"torn")
    elif damage == "short":
        os.truncate(path, path.stat().st_size - 1)
    elif damage == "absent":
        path.unlink()
    elif damage == "no checksum":
        path.with_name(path.name + ".sha256").unlink()
    else:
        key = KEY[:16] + "f" * 48
    assert not base_rows_usable(path, key)
    with pytest.raises(ResultsError, match="run the unquantized cell again"):
        BaseRows.load(path, key)
