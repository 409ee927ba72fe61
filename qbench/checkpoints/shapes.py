"""Shapes of the linear layers that quantizers will meet, from the headers alone. Imports no torch.

Layers that the files keep otherwise than the model does (experts that are stored one by one) are
left to the quantizer, which looks at the model itself.
"""

from __future__ import annotations

import re

from qbench.checkpoints import flash_linear_attention as fla
from qbench.checkpoints.checkpoint import Checkpoint
from qbench.checkpoints.classes import CLASSES, CONV1D
from qbench.checkpoints.weights import read_headers

Shapes = dict[str, tuple[int, int]]  # outputs, inputs

# Last parts of names: embeddings, LM heads, routers, convolutions, states, norms.
NONE_OF_THESE = re.compile(
    r"\w*embed\w*|wte|wpe|lm_head|\w*conv\w*|A_log|gate|router|\w*norm\w*|ln_\w+"
)
EXPERTS = re.compile(r"(^|\.)experts\.")
FUSED = re.compile(r"(^|\.)experts\.(gate_up_proj|up_proj|down_proj)$")


def linear_shapes(checkpoint: Checkpoint) -> Shapes:
    """Outputs and inputs of linear layers by the names of their weights, without ``.weight``;
    empty for a class of transformers that nobody tried."""
    if fla.recognizes(checkpoint.config):
        expected = fla.expected_shapes(fla.llama_settings(checkpoint.config))
        return _of(expected, turned=False, fused_turned=False)
    row = CLASSES.get(checkpoint.config["model_type"])
    if row is None:
        return {}
    found = {name: header.shape for name, header in read_headers(checkpoint.folder).items()}
    return _of(found, turned=row.weights == CONV1D, fused_turned=row.kind == "gpt_oss")


def _of(found: dict[str, list[int]], *, turned: bool, fused_turned: bool) -> Shapes:
    shapes: Shapes = {}
    for full, shape in found.items():
        name = full.removesuffix(".weight")
        if FUSED.search(name) and len(shape) == 3:
            rows, columns = reversed(shape[1:]) if fused_turned else shape[1:]
            shapes[name] = rows, columns
        elif full.endswith(".weight") and len(shape) == 2 and not _other(name):
            rows, columns = reversed(shape) if turned else shape
            shapes[name] = rows, columns
    return shapes


def _other(name: str) -> bool:
    last = name.rpartition(".")[2]
    router = "router" in name.split(".")
    return router or bool(NONE_OF_THESE.fullmatch(last) or EXPERTS.search(name))
