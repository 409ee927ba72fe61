"""The trained pair of 27M parameters and the text that issue figures were measured on. Skips where
the machine has neither."""

import functools
import json
from pathlib import Path

import pytest
import torch
from loading import load_model
from torch import Tensor

from qbench.checkpoints import find
from qbench.checkpoints.tokenizer import load_tokenizer

SHARED = Path(__file__).parents[3] / "shared"
NAMES = ("softmax", "softpick")
LENGTH = 1024
PAGES = 16  # of WikiText, of which those with LENGTH tokens are taken


@functools.cache
def checkpoint(name: str):
    folder = SHARED / "checkpoints" / f"{name}-27M"
    if not folder.is_dir():
        pytest.skip(f"no {folder.name} beside the project")
    return find(str(folder), revision=None, normalizer=None)


def pair_model(name: str, device: str = "cpu"):
    """In float32, with the reference attention on the CPU and the kernels on a GPU."""
    attention = "reference" if device == "cpu" else "triton"
    return load_model(checkpoint(name), dtype=torch.float32, device=device, attention=attention)


@functools.cache
def texts(name: str) -> Tensor:
    """[15, 1024]: <s> and the first 1,023 tokens of the first pages that have so many."""
    file = SHARED / "data" / "eval" / "wikitext" / "test_document_level.jsonl"
    tokenizer = load_tokenizer(checkpoint(name))
    rows = []
    for line in file.read_text().splitlines()[:PAGES]:
        ids = tokenizer(json.loads(line)["page"], add_special_tokens=False)["input_ids"]
        if len(ids) >= LENGTH - 1:
            rows.append([tokenizer.bos_token_id, *ids[: LENGTH - 1]])
    return torch.tensor(rows)


@torch.no_grad()
def loss(model, ids: Tensor, batch: int) -> float:
    """Mean of −log p of the predicted tokens, in nats; ``batch`` texts at once."""
    total = 0.0
    for part in ids.to(model.device).split(batch):
        logits = model(part, use_cache=False).logits[:, :-1].double()
        log_p = logits.log_softmax(-1).gather(-1, part[:, 1:, None])
        total -= float(log_p.sum())
    return total / (ids.shape[0] * (ids.shape[1] - 1))
