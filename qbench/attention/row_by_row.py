"""Attention whose rows are the same bits whatever stands in other rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from qbench.attention.interface import attention_name


@contextmanager
def row_by_row(model: PreTrainedModel) -> Iterator[None]:
    """Within it ``model`` attends by the reference, if it attends by our kernels.

    A kernel's tile computes several rows, and what it skips or rescales depends on all of them:
    their last bits do, too. The reference multiplies row by row. Other attention stays.
    """
    name = model.config._attn_implementation or ""
    if not (name.startswith("qbench-") and name.endswith("-triton")):
        yield
        return
    normalizer = name.removeprefix("qbench-").removesuffix("-triton")
    model.set_attn_implementation(attention_name(normalizer, "reference", model.device))
    try:
        yield
    finally:
        model.set_attn_implementation(name)
