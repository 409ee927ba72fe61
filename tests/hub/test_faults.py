"""What the hub does not give is one clear line, with what helps."""

import errno
import re

import huggingface_hub
import pytest
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub import errors

from qbench import hub
from qbench.errors import CheckpointError, DataError
from qbench.quantizers.texts import find_text

try:
    import httpx2 as httpx
except ModuleNotFoundError:  # huggingface_hub 1
    import httpx


def answer(kind: type[Exception], status: int) -> Exception:
    request = httpx.Request("GET", "https://hub")
    return kind("no", response=httpx.Response(status, request=request))


def caused(error: Exception) -> Exception:
    """As a library gives it: behind an error of its own."""
    outer = RuntimeError("could not load")
    outer.__cause__ = error
    return outer


REASONS = [
    (answer(errors.GatedRepoError, 401), "ask on its page, then sign in with `hf auth login` or"),
    (answer(errors.RepositoryNotFoundError, 404), "no such repository, or a private one: sign in"),
    (answer(errors.RevisionNotFoundError, 404), "it has no such revision"),
    (answer(errors.RemoteEntryNotFoundError, 404), "it has no such file"),
    (answer(errors.HfHubHTTPError, 500), "it answers 500; try again later"),
    (answer(errors.HfHubHTTPError, 429), r"busy \(429.*try again later"),
    (answer(errors.HfHubHTTPError, 403), r"access was denied \(403\): sign in"),
    (errors.OfflineModeIsEnabled(), "HF_HUB_OFFLINE is set, so what the cache lacks is not"),
    (httpx.ReadTimeout("slow"), r"no answer in time; .* HF_HUB_DOWNLOAD_TIMEOUT"),
    (httpx.ConnectError("refused"), "it cannot be reached; check the connection"),
    (httpx.RemoteProtocolError("cut"), "the connection broke; run again, it continues"),
    (OSError(errno.ENOSPC, "full"), r"no space is left .* HF_HOME"),
    (DatasetNotFoundError("'x' is a gated dataset"), "its owner grants access one by one"),
    (DatasetNotFoundError("'x' does not exist"), "no such repository"),
    (ValueError("odd\nand more"), "ValueError: odd;"),
]


@pytest.mark.parametrize(("error", "words"), REASONS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_checkpoint_that_the_hub_does_not_give_is_one_line(monkeypatch, error, words, wrapped):
    def fail(*_, **__):
        raise caused(error) if wrapped and not isinstance(error, ValueError) else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError) as said:
        hub.snapshot("owner/name", "v1", ())
    (line,) = said.value.lines
    assert line.startswith(
        "checkpoint owner/name: no such folder, and the hub did not give it at revision v1: "
    )
    assert line.endswith("; or name a local folder with --checkpoint NAME=FOLDER")
    assert re.search(words, line), line


def test_calibration_text_that_the_hub_does_not_have_is_one_line(monkeypatch):
    def fail(*_, **__):
        raise answer(errors.RemoteEntryNotFoundError, 404)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(DataError, match=r"^calibration\.path: hf://datasets/a/b/c: .*no such file"):
        find_text("hf://datasets/a/b/c", data=None)


@pytest.mark.parametrize("gated", [True, False])
def test_a_gated_data_set_is_refused_where_its_files_may_not_be_read(monkeypatch, gated):
    found = huggingface_hub.hf_api.DatasetInfo(
        id="a/b", sha="0" * 40, gated="manual" if gated else False, private=False, disabled=False,
        downloads=0, likes=0, tags=[], siblings=[],
    )  # fmt: skip

    def refuse(*_, **__):
        raise answer(errors.GatedRepoError, 403)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: found)
    monkeypatch.setattr(huggingface_hub.HfApi, "auth_check", refuse)
    if not gated:
        assert hub.dataset_commit("a/b") == "0" * 40
        return
    with pytest.raises(DataError, match="did not give the data set a/b: its owner grants access"):
        hub.dataset_commit("a/b")


def test_without_the_hub_a_prepared_copy_says_what_commit_it_is_of(monkeypatch, tmp_path):
    def unreachable(*_, **__):
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    with pytest.raises(DataError, match="cannot be reached"):
        hub.dataset_commit("a/b")
    (tmp_path / "a___b" / "default-x" / "0.0.0" / ("1" * 40)).mkdir(parents=True)
    assert hub.dataset_commit("a/b") == "1" * 40
