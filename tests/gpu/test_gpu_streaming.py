"""Block by block on a GPU: the scores of a resident model, to the bit, in less memory."""

import os
import shutil
import time

import pytest
import torch
from small_recipe import DEMO, run_small
from transformers import LlamaConfig, LlamaForCausalLM

from qbench.runner.workers import Workers
from qbench.store import Store


def llama(folder):
    """Blocks of 27 MB, eight of them; the tokenizer of the bundled pair."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
        num_attention_heads=16, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "softmax" / name, folder / name)
    return folder


def runs(folder, monkeypatch, scoring, *ways):
    """Records of a run for each of ``ways``: what it says of evaluation."""
    llama(folder / "llama")
    found = []
    for number, way in enumerate(ways):
        monkeypatch.setenv("QBENCH_CACHE", str(folder / f"cache{number}"))
        asked = {"limit": 20, "scoring": scoring, "tolerance": {"mean": 1, "largest": 10}, **way}
        out = folder / f"out{number}"
        run_small(
            folder, "--device", "cuda", "--out", out, checkpoints={"llama": str(folder / "llama")},
            quantizers=["bf16", "bnb-4bit", "bnb-8bit", "hqq-4bit", "rtn-4bit", "gptq-4bit"],
            calibration={"path": str(DEMO / "calibration.jsonl"), "samples": 8, "length": 256},
            evaluation=asked, compute_dtype="bfloat16",
        )  # fmt: skip
        found.append(Store(out).records())
    for resident, other in zip(*found, strict=True):
        assert other.status == "ok", other.error
        assert other.scores == resident.scores
        assert other.damage == resident.damage
        assert other.audit == resident.audit
    return found


@pytest.mark.parametrize("scoring", ["auto", "exact"])
def test_a_streamed_run_gives_the_bits_of_a_resident_one(tmp_path, monkeypatch, scoring):
    found = runs(tmp_path, monkeypatch, scoring, {"stream": False}, {"stream": True})
    peaks = [{s.name: s.peak_memory_gib for s in records[0].stages} for records in found]
    assert peaks[1]["audit"] < 0.6 * peaks[0]["audit"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("scoring", ["auto", "exact"])
def test_blocks_on_two_gpus_give_the_bits_of_one(tmp_path, monkeypatch, scoring):
    found = runs(tmp_path, monkeypatch, scoring, {"stream": False}, {"device_map": "auto"})
    details = {stage.name: stage.detail for stage in found[1][0].stages}
    assert details["load"] == "over several GPUs"


# Worker processes with a GPU each.


PATIENCE = 120


def summed():
    time.sleep(0.5)  # so that each of two processes has one
    ones = torch.ones(64, 64, device="cuda")
    return os.getpid(), float((ones @ ones).sum())


def test_processes_use_the_gpu():
    with Workers([0, 0], device="cuda") as executor:
        found = [executor.submit(summed) for _ in range(2)]
        found = [call.result(timeout=PATIENCE) for call in found]
    assert {total for _, total in found} == {64.0**3}
    assert len({pid for pid, _ in found}) == 2
