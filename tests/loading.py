"""Load a checkpoint as a plan would, or save it as a stock class of transformers."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qbench.checkpoints import find, load
from qbench.checkpoints.find import choose_attention
from qbench.errors import CheckpointError


def load_model(checkpoint, *, device, attention="auto", **settings):
    chosen = choose_attention(
        checkpoint.source, checkpoint.class_name, checkpoint.normalizer, attention, device
    )
    checkpoint = replace(checkpoint, normalizer=chosen.normalizer)
    settings.setdefault("fallback", attention == "auto")
    return load.load_model(checkpoint, device=device, attention=chosen.implementation, **settings)


def require_refused(checkpoint, words):
    with pytest.raises(CheckpointError, match=words):
        load_model(checkpoint, dtype=torch.float32, device="cpu")


def save_as_transformers(source: Path, folder: Path) -> Path:
    """Save the checkpoint in ``source`` as the class of transformers that it is read as, in
    bfloat16, its tokenizer along; return ``folder``."""
    checkpoint = find(str(source))
    model = load.read_model(checkpoint, torch.bfloat16)
    model.config.qbench_normalizer = checkpoint.normalizer
    model.save_pretrained(folder, save_original_format=False)
    for file in checkpoint.folder.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder
