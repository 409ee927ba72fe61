"""What a quantized cell takes of an unquantized one: whole parts of one attempt, or none."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from recorded_rows import KEY, recorded
from scoring_models import choices, llama

from qbench.cache import entries, prune
from qbench.evaluation.awaited import SAID_SECONDS, Awaited
from qbench.evaluation.base_file import Parts, base_rows_file, part_file
from qbench.evaluation.scoring.base_rows import save_head, save_index, save_task


class Folder:
    """What is asked of a results folder: a record that is good, made by somebody else."""

    def __init__(self, folder):
        self.folder = folder

    def lock_file(self, cell):
        return self.folder / "cell.lock"

    def handed_over(self, cell):
        return self.folder / "cell.rows"

    def whole(self, cell):
        return SimpleNamespace(status="ok")


@contextmanager
def held(path):
    """As by the process that is at work on the cell."""
    begun, end = threading.Event(), threading.Event()

    def hold():
        with FileLock(path):
            begun.set()
            end.wait(100)

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait()
    try:
        yield end
    finally:
        end.set()
        thread.join()


def hand_over(folder, rows):
    """Writes parts of ``rows`` and says so; what the index is to name."""
    path = base_rows_file(folder, KEY)
    head = save_head(path, KEY, rows.weight, rows.bias)
    tasks = {name: save_task(path, KEY, name, one) for name, one in rows.tasks.items()}
    parts = Parts(head=head, tasks=tasks)
    (folder / "cell.rows").write_text(json.dumps(asdict(parts)))
    return path, parts


@pytest.fixture
def said():
    return []


@pytest.fixture
def awaited(tmp_path, said):
    base = SimpleNamespace(cell="softmax/fp32", key=KEY)
    return Awaited(base, Folder(tmp_path), tmp_path, said.append)


def test_a_wait_is_said_once_and_one_of_a_moment_is_not(tmp_path, awaited, said):
    rows = recorded(llama(), choices(3, task="a"))
    with held(tmp_path / "cell.lock") as end:
        path, parts = hand_over(tmp_path, rows)
        assert awaited.rows("a") is not None
        save_index(path, KEY, parts)
        assert said == []
        threading.Timer(SAID_SECONDS + 0.3, end.set).start()
        assert awaited.record() is not None
    assert said == ["softmax/fp32"]
    assert awaited.waited > SAID_SECONDS


def test_rows_of_an_earlier_attempt_that_differ_give_no_damage(tmp_path, awaited):
    """As where the process that handed them over died, and another scored other bits."""
    earlier, later = (recorded(llama(seed=seed), choices(3, task="a")) for seed in (0, 1))
    with held(tmp_path / "cell.lock") as end:
        hand_over(tmp_path, earlier)
        assert not awaited.look()
        taken = awaited.rows("a")
        assert torch.equal(taken.tasks["a"].rows, earlier.tasks["a"].rows)
        later.save(base_rows_file(tmp_path, KEY))
        end.set()
        assert awaited.record() is None
    assert awaited.reason == "softmax/fp32 was scored anew meanwhile; run this again"
    assert awaited.rows("a") is None


def test_rows_of_an_earlier_attempt_that_are_the_same_count(tmp_path, awaited):
    rows = recorded(llama(), choices(3, task="a"))
    with held(tmp_path / "cell.lock") as end:
        path, parts = hand_over(tmp_path, rows)
        assert torch.equal(awaited.rows("a").weight, rows.weight)
        save_index(path, KEY, parts)
        end.set()
        assert awaited.record() is not None


@pytest.mark.parametrize("damage", ["flipped", "absent"])
def test_a_damaged_part_is_never_measured_against(tmp_path, awaited, damage):
    with held(tmp_path / "cell.lock") as end:
        path, parts = hand_over(tmp_path, recorded(llama(), choices(3, task="a")))
        part = part_file(path, parts.tasks["a"])
        changed = bytearray(part.read_bytes())
        changed[-1] ^= 1
        part.write_bytes(changed) if damage == "flipped" else part.unlink()
        save_index(path, KEY, parts)
        threading.Timer(0.3, end.set).start()
        assert awaited.rows("a") is None
    assert str(part) in awaited.reason
    assert "run the unquantized cell again" in awaited.reason
    assert awaited.record() is None


def test_a_part_under_the_name_of_another_task_is_refused(tmp_path, awaited):
    with held(tmp_path / "cell.lock") as end:
        path, parts = hand_over(tmp_path, recorded(llama(), choices(3, task="a")))
        mixed = Parts(head=parts.head, tasks={"b": parts.tasks["a"]})
        (tmp_path / "cell.rows").write_text(json.dumps(asdict(mixed)))
        save_index(path, KEY, mixed)
        threading.Timer(0.3, end.set).start()
        assert awaited.rows("b") is None
    assert "of another cell or task than it is said to be" in awaited.reason


def test_parts_of_a_cell_that_never_ended_are_listed_and_pruned(tmp_path):
    folder = tmp_path / "distributions"
    folder.mkdir()
    hand_over(folder, recorded(llama(), choices(3, task="a")))
    (folder / "cell.rows").unlink()
    (entry,) = entries(tmp_path)
    assert entry.about == f"unquantized cell {KEY[:16]}"
    assert entry.bytes == sum(path.stat().st_size for path in folder.glob(f"{KEY[:16]}.*.rows"))
    assert prune(tmp_path, max_bytes=0)[0] == [entry]
    assert entries(tmp_path) == []
