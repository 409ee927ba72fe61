"""What the hub gives is used; what it refuses is one line with the library's own reason."""

import re

import huggingface_hub
import pytest
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub import errors
from small_recipe import DEMO

from qbench import hub
from qbench.checkpoints import find
from qbench.errors import CheckpointError, DataError
from qbench.quantizers.texts import find_text

try:
    import httpx2 as httpx
except ModuleNotFoundError:  # huggingface_hub 1
    import httpx


def answer(kind, status, text="no"):
    request = httpx.Request("GET", "https://hub")
    return kind(text, response=httpx.Response(status, request=request))


def fail_with(error):
    def fail(*_, **__):
        raise error

    return fail


def caused_by(error):
    outer = RuntimeError("could not load")
    outer.__cause__ = error
    return outer


REASONS = [
    (answer(errors.GatedRepoError, 401, "Cannot access gated repo\nfor url"),
     "GatedRepoError: Cannot access gated repo;"),
    (answer(errors.RevisionNotFoundError, 404), "RevisionNotFoundError: no;"),
    (errors.OfflineModeIsEnabled("offline"), "OfflineModeIsEnabled: offline;"),
    (httpx.ConnectError("refused"), "ConnectError: refused;"),
    (DatasetNotFoundError("'x' does not exist"), "DatasetNotFoundError: 'x' does not exist;"),
    (ValueError("odd\nand more"), "ValueError: odd;"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "words"), REASONS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_checkpoint_that_the_hub_refuses_is_one_line(monkeypatch, error, words, wrapped):
    if wrapped and not isinstance(error, ValueError):
        error = caused_by(error)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail_with(error))
    with pytest.raises(CheckpointError) as raised:
        find("owner/name", revision="v1")
    (line,) = raised.value.lines
    start = "checkpoint owner/name: no such folder, and not fetched from the hub at revision v1: "
    assert line.startswith(start + words)
    assert line.endswith("--checkpoint NAME=FOLDER")
    assert hub.is_hub_error(error) == (not isinstance(error, ValueError))


def test_a_checkpoint_of_the_hub_is_read_from_the_folder_that_it_is_downloaded_to(monkeypatch):
    calls = []

    def download(hub_id, *, revision, allow_patterns):
        calls.append((hub_id, revision, allow_patterns))
        return str(DEMO / "softpick")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint = find("owner/name", revision="v1")
    assert (checkpoint.normalizer, checkpoint.source) == ("softpick", "owner/name")
    [(hub_id, revision, patterns)] = calls
    assert (hub_id, revision) == ("owner/name", "v1")
    assert {"model*.safetensors", "config.json", "tokenizer*.json"} <= set(patterns)
    assert not any(re.search(r"bin|pt", pattern) for pattern in patterns if "*" in pattern)


def test_calibration_text_that_the_hub_lacks_is_one_line(monkeypatch):
    error = answer(errors.RemoteEntryNotFoundError, 404)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail_with(error))
    with pytest.raises(DataError, match=r"^calibration\.path: hf:.*EntryNotFound"):
        find_text("hf://datasets/a/b/c", data=None)


@pytest.mark.parametrize("gated", [True, False])
def test_a_gated_data_set_is_refused_if_its_files_may_not_be_read(monkeypatch, gated):
    about = huggingface_hub.hf_api.DatasetInfo(
        id="a/b", sha="0" * 40, gated="manual" if gated else False, private=False, disabled=False,
        downloads=0, likes=0, tags=[], siblings=[],
    )  # fmt: skip
    refused = fail_with(answer(errors.GatedRepoError, 403))
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: about)
    monkeypatch.setattr(huggingface_hub.HfApi, "auth_check", refused)
    if not gated:
        assert hub.dataset_commit("a/b") == "0" * 40
        return
    with pytest.raises(DataError, match="a/b cannot be fetched from the hub: GatedRepoError"):
        hub.dataset_commit("a/b")


def test_without_the_hub_the_prepared_copy_gives_the_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(
        huggingface_hub.HfApi, "dataset_info", fail_with(httpx.ConnectError("refused"))
    )
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    with pytest.raises(DataError, match="ConnectError: refused"):
        hub.dataset_commit("a/b")
    (tmp_path / "a___b" / "default-x" / "0.0.0" / ("1" * 40)).mkdir(parents=True)
    assert hub.dataset_commit("a/b") == "1" * 40
