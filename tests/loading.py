"""Load a checkpoint as a plan would, or save it as a stock class of transformers."""

import shutil
from dataclasses import replace
from pathlib import Path

import torch

from qbench.checkpoints import find, load
from qbench.checkpoints.supported import choose_attention


def load_model(checkpoint, *, device, attention="auto", **settings):
    if attention == "auto":
        chosen = choose_attention(
            checkpoint.source, checkpoint.support, checkpoint.normalizer, attention, device
        )
        checkpoint = replace(checkpoint, normalizer=chosen.normalizer)
        attention = chosen.implementation
    return load.load_model(checkpoint, device=device, attention=attention, **settings)


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
