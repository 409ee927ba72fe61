"""Block by block on a GPU: the scores of a resident model, to the bit, in less memory."""

import pytest
import torch
from small_recipe import DEMO, qbench, small_recipe

from qbench.store import Store


def llama(folder):
    """Blocks of 27 MB, eight of them; the tokenizer of the bundled pair."""
    import shutil

    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
        num_attention_heads=16, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "softmax" / name, folder / name)
    return folder


@pytest.mark.parametrize("scoring", ["fast", "exact"])
def test_a_streamed_run_gives_the_bits_of_a_resident_one(tmp_path, monkeypatch, scoring):
    path = small_recipe(
        tmp_path,
        checkpoints={"llama": str(llama(tmp_path / "llama"))},
        quantizers=["bf16", "bnb-4bit", "bnb-8bit", "hqq-4bit", "rtn-4bit", "gptq-4bit"],
        compute_dtype="bfloat16",
        calibration={"path": str(DEMO / "calibration.jsonl"), "samples": 8, "length": 256},
        evaluation={"limit": 20, "scoring": scoring, "tolerance": {"mean": 1, "largest": 10}},
    )
    found = []
    for option in ("--no-stream", "--stream"):
        monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / f"cache{option}"))
        out = tmp_path / f"out{option}"
        assert qbench("run", path, "--out", out, option, "--device", "cuda") == 0
        found.append(Store(out).records())
    for resident, streamed in zip(*found, strict=True):
        assert streamed.status == "ok", streamed.error
        assert streamed.scores == resident.scores
        assert streamed.damage == resident.damage
        assert streamed.audit == resident.audit
    peaks = [{s.name: s.peak_memory_gib for s in records[0].stages} for records in found]
    assert peaks[1]["audit"] < 0.6 * peaks[0]["audit"]
