"""A training that is stopped, or breaks off, ends with the same bits as one that is not."""

import json
import resource

import pytest

from qbench.checkpoints import find
from qbench.errors import CheckpointError, OutputError, TrainingError
from qbench.training.loop import Trainer


def weights(out, run="softpick-seed3"):
    return (out / run / "model.safetensors").read_bytes()


def steps_logged(out):
    log = (out / "softpick-seed3" / "state" / "log.jsonl").read_text().splitlines()
    return [{**json.loads(line), "tokens_per_s": None} for line in log]


def test_a_training_that_breaks_off_goes_on_and_ends_with_the_same_bits(
    tmp_path, train, trained, monkeypatch
):
    """At step 15 of 40: its state is of step 10, and its log is ahead of that."""
    append, settings = Trainer._append, {"normalizers": ["softpick"]}

    def breaks(trainer, kind, step, **values):
        append(trainer, kind, step, **values)
        if step == 15:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_append", breaks)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, **settings)
    monkeypatch.undo()
    assert not (tmp_path / "softpick-seed3" / "training.json").exists()
    [record] = train(tmp_path, **settings)
    assert [session.first_step for session in record.sessions] == [0, 10]
    assert weights(tmp_path) == weights(trained[0])
    assert steps_logged(tmp_path) == steps_logged(trained[0])


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 7])
def test_stops_at_any_step_change_no_bit(tmp_path, train, trained, first):
    settings = {"normalizers": ["softmax"]}
    assert train(tmp_path, stop_after=first, **settings) == []
    assert train(tmp_path, stop_after=6, **settings) == []
    output = []
    [record] = train(tmp_path, log=output.append, **settings)
    assert f"softmax-seed3: continues from step {first + 6}" in output
    assert [session.first_step for session in record.sessions] == [0, first, first + 6]
    assert weights(tmp_path, "softmax-seed3") == weights(trained[0], "softmax-seed3")


def test_a_state_of_other_settings_is_not_gone_on_with(tmp_path, train):
    train(tmp_path, stop_after=7)
    with pytest.raises(TrainingError, match="other settings, data or seed"):
        train(tmp_path, schedule={"warmup_steps": 6})


def test_what_is_trained_is_not_trained_again_and_other_settings_do_not_replace_it(tmp_path, train):
    first = train(tmp_path, tokens=640)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert train(tmp_path, tokens=640) == first
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    with pytest.raises(TrainingError, match="other settings"):
        train(tmp_path, tokens=704)


def flipped(payload, place):
    """One bit, a share of the way through it, is another."""
    changed = bytearray(payload)
    changed[int(place * len(payload))] ^= 4
    return bytes(changed)


def test_a_damaged_state_is_not_gone_on_with(tmp_path, train):
    train(tmp_path, stop_after=7, normalizers=["softmax"])
    state = tmp_path / "softmax-seed3" / "state" / "last.safetensors"
    whole = state.read_bytes()
    for damaged in (
        *(flipped(whole, place) for place in (0.1, 0.3, 0.5, 0.7, 0.9, 0.999)),
        *(whole[:1000], b"", whole + b"\0"),
        whole.replace(b'\\"step\\":7', b'\\"step\\":9'),
    ):
        assert damaged != whole
        state.write_bytes(damaged)
        with pytest.raises(
            TrainingError, match=r"last\.safetensors: damaged.*; remove it to train"
        ):
            train(tmp_path, normalizers=["softmax"])


DAMAGE = {  # of files of a finished training: what was, and what stands there instead
    "model.safetensors": None,
    "config.json": (b'"rope_theta": 10000.0', b'"rope_theta": 90000.0'),
    "tokenizer.json": (b'"cat"', b'"cow"'),
    "state/log.jsonl": (b'"loss": ', b'"loss": 1'),
    "training.json": (b'"final_loss": ', b'"final_loss": 1'),
}


@pytest.mark.parametrize("file", DAMAGE)
def test_a_finished_runs_damaged_files_are_named_and_made_again(tmp_path, train, file):
    settings = {"normalizers": ["softmax"], "tokens": 640}
    [before] = train(tmp_path, **settings)
    folder = tmp_path / "softmax-seed3"
    path, intact = folder / file, (folder / file).read_bytes()
    changed = intact.replace(*DAMAGE[file], 1) if DAMAGE[file] else flipped(intact, 0.8)
    assert changed != intact
    for damaged in (changed, intact[:300]):
        path.write_bytes(damaged)
        with pytest.raises(TrainingError, match=rf"{file}: .*remove .*training\.json; the same"):
            train(tmp_path, **settings)
    (folder / "training.json").unlink()
    [after] = train(tmp_path, **settings)
    assert (after.final_loss, after.files) == (before.final_loss, before.files)
    if file != "training.json":  # it says when it was written
        assert path.read_bytes() == intact
    assert find(str(folder)).training.seed == 3
    path.write_bytes(changed)
    if file in ("config.json", "training.json"):
        with pytest.raises(CheckpointError, match=rf"{file}: changed after training"):
            find(str(folder))


def test_the_record_of_an_earlier_version_has_no_checksum(tmp_path, train):
    settings = {"normalizers": ["softmax"], "tokens": 640}
    train(tmp_path, **settings)
    path = tmp_path / "softmax-seed3" / "training.json"
    values = json.loads(path.read_text())
    del values["checksum"]
    files = values.pop("files")
    values["weights"] = {"model.safetensors": files["model.safetensors"]}
    path.write_text(json.dumps(values))
    [record] = train(tmp_path, **settings)
    assert record.files == values["weights"]


def test_a_state_that_cannot_be_written_leaves_the_one_before(tmp_path, train):
    """Where the disk is full, for one."""
    train(tmp_path, stop_after=7, normalizers=["softmax"])
    state = tmp_path / "softmax-seed3" / "state" / "last.safetensors"
    before = state.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(OutputError, match=r"last\.safetensors: cannot be written \(.*large"):
            train(tmp_path, normalizers=["softmax"], watch={"every": 40})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert state.read_bytes() == before
    assert {path.name for path in state.parent.iterdir()} == {"last.safetensors", "log.jsonl"}
