"""A checkpoint as a model that attends as a plan would have it."""

from dataclasses import replace

from qbench.checkpoints import load
from qbench.checkpoints.supported import choose_attention


def load_model(checkpoint, *, device, attention="auto", **settings):
    if attention == "auto":
        chosen = choose_attention(
            checkpoint.source, checkpoint.support, checkpoint.normalizer, attention, device
        )
        checkpoint = replace(checkpoint, normalizer=chosen.normalizer)
        attention = chosen.implementation
    return load.load_model(checkpoint, device=device, attention=attention, **settings)
