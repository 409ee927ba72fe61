"""How a training computes: precision, compilation, what several GPUs exchange. No torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from qbench.recipe import Flag, Strict


class Compute(Strict):
    """``bfloat16``: float32 weights and optimizer, passes in bfloat16 under autocast with a
    bfloat16 residual stream. ``deterministic``: the same bits from the same start, which resuming
    rests on. ``compile``: torch.compile's mode, or false. ``graphs``: the model compiled whole
    (``auto``), or layer by layer, so that gradients are averaged over the GPUs while earlier
    layers' are still computed: for slow links, as it keeps the host busier than the GPUs.
    ``travel``: what gradients are averaged in."""

    precision: Literal["bfloat16", "float32"] = "bfloat16"
    attention: Literal["auto", "reference", "triton"] = "auto"
    compile: Literal["default", "max-autotune-no-cudagraphs"] | Literal[False] = "default"
    graphs: Literal["auto", "whole", "layers"] = "auto"
    travel: Literal["float32", "bfloat16"] = "float32"
    deterministic: Flag = True

    @field_validator("compile", mode="before")
    @classmethod
    def _without_graphs_of_cuda(cls, mode: Any) -> Any:
        if mode in ("reduce-overhead", "max-autotune"):
            raise ValueError(
                f"{mode} replays CUDA graphs, where a step's second pass overwrites the gradients "
                "of its first; there are default, max-autotune-no-cudagraphs and false"
            )
        return mode
