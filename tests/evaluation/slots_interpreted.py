"""Prints whether a step that takes columns from the device, as CUDA graphs do, says what a step
launched from the host says; by the kernels, in Triton's interpreter."""

import os

os.environ["TRITON_INTERPRET"] = "1"

from types import SimpleNamespace

from scoring_models import llama

from qbench.attention.transformers import attend
from qbench.evaluation.scoring import generate
from qbench.evaluation.scoring.generate import Prompt, decode

model = llama()
prompts = [Prompt(ids=list(range(3, 5 + 3 * i)), limit=2 + i % 2) for i in range(3)]
generate.at_once = lambda model, length: 2
generate.SPARE_COLUMNS = 0
captured = []


def as_captured(run):
    captured.append(run.at.slots)
    return SimpleNamespace(replay=run._device_step())


attend(model, normalizer="softpick", implementation="triton")
launched = decode(model, prompts)
generate.takes_graphs, generate._Decoding._capture = lambda model: True, as_captured
on_device = decode(model, prompts)
attend(model, normalizer="softpick", implementation="reference")
generate.takes_graphs = lambda model: False
print(launched == on_device == decode(model, prompts), bool(captured))
