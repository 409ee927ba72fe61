"""Downloads that fail: one clear line, and nothing half-loaded taken for a checkpoint."""

import re
import time

import pytest
from hub.content import SOFTPICK
from hub.server import Fault

WEIGHTS = r"/resolve/[0-9a-f]+/model-00001"
GATED = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model is restricted."}


def blobs(tmp_path):
    return [p for p in (tmp_path / "hf").rglob("blobs/*") if not p.name.endswith(".incomplete")]


def test_a_checkpoint_comes_with_what_it_reads_and_nothing_else(hub, ask, tmp_path):
    ended = ask("checkpoint", SOFTPICK)
    assert ended.code == 0, ended.errors
    assert ended.output.split()[1] == hub.model(SOFTPICK).names["main"]
    asked = " ".join(hub.requests)
    assert "README" not in asked
    assert "optimizer" not in asked


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault("/api/models", 401, GATED), "ask on its page, then sign in with `hf auth login` or"),
        (Fault("/api/models", 500, {"Retry-After": "0"}), "it answers 500"),
        (Fault("/api/models", 429, {"Retry-After": "3600"}), r"busy \(429.*try again later"),
    ],
    ids=["gated", "broken", "busy"],
)
def test_a_checkpoint_that_the_hub_refuses_is_one_line(hub, ask, fault, words):
    hub.faults.append(fault)
    line = ask("checkpoint", SOFTPICK).line
    assert line.startswith(f"checkpoint {SOFTPICK}: no such folder, and the hub did not give it")
    assert line.endswith("name a local folder with --checkpoint NAME=FOLDER")
    assert re.search(words, line), line


@pytest.mark.parametrize(
    ("name", "revision", "words"),
    [
        ("zaydzuhri/nosuch", "", "no such repository"),
        (SOFTPICK, "nosuch", "at revision nosuch: it has no such revision"),
    ],
)
def test_what_is_not_there_is_said(ask, name, revision, words):
    assert words in ask("checkpoint", name, revision).line


def test_a_hub_that_cannot_be_reached_is_said(ask):
    line = ask("checkpoint", SOFTPICK, HF_ENDPOINT="http://127.0.0.1:9").line
    assert "cannot be reached" in line


@pytest.mark.slow
def test_a_hub_that_stops_answering_is_given_up(hub, ask):
    hub.faults.append(Fault(WEIGHTS, seconds=30, method="GET"))
    start = time.monotonic()
    line = ask("checkpoint", SOFTPICK, HF_HUB_DOWNLOAD_TIMEOUT="1").line
    assert "no answer in time" in line
    assert "HF_HUB_DOWNLOAD_TIMEOUT" in line
    assert time.monotonic() - start < 25


@pytest.mark.slow
def test_a_broken_download_is_no_checkpoint_and_is_taken_up_again(hub, ask, tmp_path):
    hub.faults.append(Fault(WEIGHTS, cut_after=5000, method="GET"))
    line = ask("checkpoint", SOFTPICK).line
    assert "the hub did not give it" in line
    line = ask("checkpoint", SOFTPICK, HF_HUB_OFFLINE="1").line
    assert "HF_HUB_OFFLINE is set, so what the cache lacks is not fetched" in line
    hub.faults.clear()
    hub.requests.clear()
    ended = ask("checkpoint", SOFTPICK)
    assert ended.code == 0, ended.errors
    whole = hub.model(SOFTPICK).commits[hub.model(SOFTPICK).names["main"]]
    assert {path.read_bytes() for path in blobs(tmp_path)} <= set(whole.values())


def test_a_checkpoint_of_the_cache_serves_without_the_hub(hub, ask):
    first = ask("checkpoint", SOFTPICK).output.strip()
    hub.requests.clear()
    offline = ask("checkpoint", SOFTPICK, HF_HUB_OFFLINE="1")
    assert offline.output.strip() == first
    assert hub.requests == []
    down = ask("checkpoint", SOFTPICK, HF_ENDPOINT="http://127.0.0.1:9")
    assert down.output.strip() == first
