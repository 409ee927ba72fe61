"""`qbench train --gpus --workers`: runs in processes of their own, with the bits of one after the
other, and what becomes of them where one of them, or their parent, ends early."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock
from small_recipe import qbench, small_recipe

from qbench.errors import STOPPED, DataError, QbenchError, RecipeError, TrainingError
from qbench.training.progress import read_progress
from qbench.training.side_by_side import PART, Part, train_side_by_side

ROOT = Path(__file__).parents[2]
PATIENCE = 120  # seconds that make a hang
MANY = {"tokens": 7_680, "watch": {"every": 60}, "save_every": 20}  # 120 steps
ENDLESS = {"tokens": 10**7, "watch": {"every": 10**6}}


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def part(name, code):
    return Part(name=name, command=(sys.executable, "-c", code), settings="of it")


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def started(arguments, **more):
    """The command, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "qbench", "train", *map(str, arguments), "--device", "cpu"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more,
    )  # fmt: skip


def children(process):
    """Ids of the processes of runs, by the run's name."""
    shown = subprocess.run(["ps", "-ww", "-o", "pid,args", "--ppid", str(process.pid)],
                           capture_output=True, text=True, check=False).stdout  # fmt: skip
    lines = [line.split() for line in shown.splitlines() if "--normalizer" in line]
    return {
        f"{words[words.index('--normalizer') + 1]}-seed{words[words.index('--seed') + 1]}": int(
            words[0]
        )
        for words in lines
    }


WAITS = """
import os, pathlib, time
print(os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
while not pathlib.Path({file!r}).exists():
    time.sleep(0.01)
"""


def test_a_run_goes_to_the_gpu_with_the_fewest_in_the_order_of_the_recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    parts = [part(f"run{n}", WAITS.format(file=str(tmp_path / f"go{n}"))) for n in range(6)]
    said = []

    def say(line):
        said.append(line)
        if len(said) == 4:
            (tmp_path / "go3").touch()  # of the second GPU, which has room then
        if len(said) == 5:
            (tmp_path / "go2").touch()
        if len(said) == 6:
            for n in range(6):
                (tmp_path / f"go{n}").touch()

    assert train_side_by_side(parts, [0, 1, 0, 1], device="cuda", say=say) == []
    assert sorted(said[:4]) == ["run0: 4", "run1: 7", "run2: 4", "run3: 7"]
    assert said[4:] == ["run4: 7", "run5: 4"]


@pytest.mark.parametrize(("theirs", "threads"), [(None, "4"), ("3", "3")])
def test_cores_are_divided_among_runs_unless_the_user_says_how(monkeypatch, theirs, threads):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    if theirs:
        monkeypatch.setenv("OMP_NUM_THREADS", theirs)
    said = []
    parts = [part(n, "import os; print(os.environ['OMP_NUM_THREADS'])") for n in "ab"]
    train_side_by_side(parts, [0, 0, 0], device="cpu", say=said.append)
    assert sorted(said) == [f"a: {threads}", f"b: {threads}"]


def test_a_process_that_fails_is_named_with_its_last_words_and_the_others_go_on():
    parts = [
        part("a", "import sys; print('a: whole'); print('half', end=''); sys.exit(2)"),
        part("b", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        part("c", "import sys; sys.exit(3)"),
        part("d", "print('well')"),
    ]
    said = []
    broken = train_side_by_side(parts, [0], device="cpu", say=said.append)
    assert said == ["a: whole", "a: half", "d: well"]
    assert [(one.name, one.code) for one in broken] == [("a", 2), ("b", 1), ("c", 3)]
    assert [broken[0].error, broken[2].error] == ["half", "its process ended with exit code 3"]
    assert broken[1].error.startswith("its process was ended by signal 9 (Killed)")


def test_what_broke_and_was_killed_ends_with_the_same_bits_when_the_command_is_given_again(
    tmp_path, recipe_file, train
):
    """Of four runs one cannot begin, and one is killed; the others are not touched by that."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    settings = {"seeds": [1, 2], **MANY}
    path = recipe_file(**settings)
    evaluation = small_recipe(tmp_path, tasks=["demo_lastword"])
    state = out / "softpick-seed1" / "state" / "last.safetensors"
    (out / "softmax-seed1").mkdir(parents=True)
    with FileLock(out / "softmax-seed1" / ".lock"):
        process = started([path, "--out", out, "--workers", "2", "--evaluate", evaluation])
        until(lambda: "softpick-seed1" in children(process))
        runs = children(process)
        until(state.is_file)
        os.kill(runs["softpick-seed1"], signal.SIGKILL)
        told, said = process.communicate(timeout=PATIENCE)
    lines = said.splitlines()
    assert process.returncode == 2, said
    assert lines[-2] == f"softmax-seed1: {out}/softmax-seed1: another process trains there"
    assert lines[-1].startswith("softpick-seed1: its process was ended by signal 9 (Killed)")
    assert "2 of 4 runs are done; the same command goes on" in told
    assert "step 120 of 120" in said
    assert not (out / "evaluation").exists()

    process = started([path, "--out", out, "--workers", "2"])
    told, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    records = train(whole, **settings)
    assert [line.partition(" after")[0] for line in told.splitlines()] == [
        f"{record.normalizer}, seed {record.seed}: loss {record.final_loss:.4f}"
        for record in records
    ]
    names = [f"{record.normalizer}-seed{record.seed}" for record in records]
    assert {line.partition(": ")[0] for line in said.splitlines()} >= set(names)
    assert "softmax-seed2: trained already" in said
    for name in names:
        one, other = (folder / name / "model.safetensors" for folder in (whole, out))
        assert one.read_bytes() == other.read_bytes()
        assert (out / f"train-{name}.log").is_file()
    sessions = json.loads((out / "softpick-seed1" / "training.json").read_text())["sessions"]
    assert len(sessions) == 2
    assert not (out / "train.log").exists()
    assert (out / "curves.svg").is_file()


def test_ctrl_c_ends_every_run(tmp_path, recipe_file):
    """In two seconds; twice as many are allowed for a machine that is busy."""
    process = started([recipe_file(**ENDLESS), "--out", tmp_path / "out", "--workers", "2"])
    until(lambda: len(children(process)) == 2)
    runs = children(process).values()
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE)
    until(lambda: not any(alive(run) for run in runs))
    assert time.monotonic() - begun < 4
    assert process.returncode == 130
    assert said.splitlines()[-1] == STOPPED


def test_a_run_whose_parent_was_killed_ends_and_its_state_is_kept(tmp_path, recipe_file):
    path, out = recipe_file(**ENDLESS, normalizers=["softpick"], save_every=2), tmp_path / "out"
    process = started([path, "--out", out, "--workers", "2"])
    state = out / "softpick-seed3" / "state" / "last.safetensors"
    until(lambda: state.is_file() or process.poll() is not None)
    runs = children(process)
    assert list(runs) == ["softpick-seed3"]
    begun = time.monotonic()
    process.kill()
    process.communicate(timeout=PATIENCE)
    until(lambda: not alive(runs["softpick-seed3"]))
    assert time.monotonic() - begun < 4
    assert read_progress(state).step > 0


@pytest.mark.parametrize(
    ("options", "changed", "error", "said"),
    [
        (("--gpus", "all"), {}, RecipeError, "--gpus all: this run computes on the CPU"),
        ((), {"model": {"vocabulary": 16}}, RecipeError, "the tokenizer of"),
        ((), {"watch": {"samples": 500}}, DataError, "watch.samples asks for 500"),
        ((), {"data": {"tokens": "nowhere"}}, QbenchError, "nowhere"),
        ((), {"normalizers": ["softmin"]}, RecipeError, "unknown normalizer"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_any_process(
    tmp_path, recipe_file, monkeypatch, options, changed, error, said
):
    monkeypatch.setattr(subprocess, "Popen", None)
    out = tmp_path / "out"
    with pytest.raises(error, match=said):
        qbench("train", recipe_file(**changed), "--out", out, "--device", "cpu", "--workers", 2,
               *options)  # fmt: skip
    assert not out.exists()


def test_a_state_of_other_settings_is_refused_before_any_process(
    tmp_path, recipe_file, train, monkeypatch
):
    train(tmp_path / "out", stop_after=1)
    monkeypatch.setattr(subprocess, "Popen", None)
    path = recipe_file(schedule={"warmup_steps": 6})
    with pytest.raises(TrainingError, match="other settings, data or seed"):
        qbench("train", path, "--out", tmp_path / "out", "--device", "cpu", "--workers", 2)


def test_what_is_trained_is_evaluated_on_the_same_gpus(tmp_path, recipe_file, train, monkeypatch):
    settings = {"tokens": 64, "normalizers": ["softmax"]}
    train(tmp_path / "out", **settings)
    evaluated = []
    monkeypatch.setattr("qbench.cli.run.run", lambda *_, **more: evaluated.append(more))
    monkeypatch.setattr("qbench.machine.choose_device", lambda _: "cuda")
    monkeypatch.setattr("qbench.machine.device_count", lambda: 2)
    evaluation = small_recipe(tmp_path, checkpoints={"softmax": "nowhere"})
    for more, gpus in ((), "2"), (("--cluster", "local:1"), None):
        arguments = ("--gpus", 2, "--workers", 2, "--evaluate", evaluation, *more)
        assert qbench("train", recipe_file(**settings), "--out", tmp_path / "out", *arguments) == 0
        assert evaluated.pop()["gpus"] == gpus
    assert evaluated == []


def test_torchrun_spreads_one_run_not_several(tmp_path, recipe_file, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for option in (("--workers", 2), ("--gpus", "all")):
        with pytest.raises(RecipeError, match="torchrun spreads one run over GPUs; leave them out"):
            qbench("train", recipe_file(), "--out", tmp_path / "out", "--device", "cpu", *option)
    assert not (tmp_path / "out").exists()


def test_a_recipe_that_is_edited_while_runs_wait_is_not_trained(tmp_path, recipe_file, monkeypatch):
    """Its pairs would not be alike."""
    monkeypatch.setenv(PART, "0" * 64)
    process = started(
        [recipe_file(), "--normalizer", "softmax", "--out", tmp_path / "out"],
        stdin=subprocess.PIPE,
    )
    with process:
        assert process.wait(PATIENCE) == 2
        assert "changed after this command began; give it again" in process.stderr.read()


def test_what_a_run_is_told_is_what_the_command_was_told(tmp_path, recipe_file, monkeypatch):
    seen = []

    def ran(parts, slots, **_):
        seen.extend(parts)
        return []

    monkeypatch.setattr("qbench.cli.training_runs.train_side_by_side", ran)
    path = recipe_file(seeds=[1, 2])
    out = tmp_path / "out"
    options = ["--tokens", "640", "--sequences", "1", "--stop-after", "3", "--no-weights",
               "--largest-file", "5", "--normalizer", "softpick"]  # fmt: skip
    assert qbench("train", path, "--out", out, "--workers", 1, "--device", "cpu", *options) == 0
    assert [one.name for one in seen] == ["softpick-seed1", "softpick-seed2"]
    words = " ".join(seen[1].command[1:])
    for option in ("-m qbench train", "--normalizer softpick --seed 2", "--tokens 640",
                   "--sequences 1", "--stop-after 3", "--no-weights", "--largest-file 5",
                   f"--out {out}", "--device cpu"):  # fmt: skip
        assert option in words
    assert "--workers" not in words


def test_the_parent_of_runs_loads_no_torch():
    code = (
        "import sys, qbench.cli.training_runs, qbench.cli.trained, "
        "qbench.training.fit, qbench.training.held_out; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          check=True)  # fmt: skip
    assert done.stdout.strip() == "False"
