"""Does it pay to skip key tiles whose scores are all ≤ 0? On random scores, on scores of which one
in a hundred is positive, and on what a trained model computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qbench.attention.kernels import launch, layouts, tiles
from qbench.attention.kernels.settings import NONE, Settings
from qbench.bench.attention_timing import Clock, random_tensor, sparse_keys
from qbench.errors import DataError
from qbench.text import markdown

LENGTH = 2048


def measure_skipping(clock: Clock, checkpoint: str | None, text: Path | None) -> list[dict]:
    """Milliseconds with and without skipping: prefill skips tiles, decode single values.

    Decode takes every sequence's last query over all its keys. Raises DataError where ``text``
    is shorter than 2,048 tokens.
    """
    rows = []
    for name, query, key, value in _inputs(checkpoint, text):
        last = query[:, :, -1:].contiguous()
        row: dict[str, Any] = {"scores": name, "shape": tuple(key.shape)}
        width = layouts.block(key.shape[3])
        for step, queries, tile in (
            ("prefill", query, tiles.forward_tile(width, key.dtype, "softpick")),
            ("decode", last, tiles.decode_tile(width, key.dtype)),
        ):
            for skip in (False, True):
                chosen = replace(tile, skip=skip)
                row[f"{step} {'skipping' if skip else 'whole'} ms"] = clock(
                    lambda q=queries, t=chosen, k=key, v=value: launch.forward(
                        q, k, v, None, None, NONE,
                        Settings(
                            "softpick", q.shape[3] ** -0.5, 0.0, True, 0, q.shape[2], k.shape[2]
                        ),
                        t,
                    )
                )  # fmt: skip
        rows.append(row)
    return rows


def skipping_table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown."""
    columns = [
        f"{step} {how} ms" for step in ("prefill", "decode") for how in ("whole", "skipping")
    ]
    cells = [
        [row["scores"], ", ".join(map(str, row["shape"])), *(f"{row[c]:.3f}" for c in columns)]
        for row in rows
    ]
    head = ("scores", "B, H, T, D", *columns)
    return [
        "",
        "Softpick with and without skipping where no score is positive.",
        "",
        markdown.table(head, cells, align="ll" + "r" * len(columns)),
    ]


def _inputs(
    checkpoint: str | None, text: Path | None
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    query, key, value = (random_tensor(32, LENGTH, 16, 64) for _ in range(3))
    yield "random", query, key, value
    # All queries of a head alike, so that the same keys are positive for each.
    query = query[:, :, :1].expand_as(query).contiguous()
    yield "99 % negative", query, sparse_keys(query[:, :, :1], key), value
    if checkpoint is not None and text is not None:
        yield (f"{Path(checkpoint).name}, all layers", *_activations(checkpoint, text))


def _activations(checkpoint: str, text: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all layers [layers, H, T, D] over the text's first tokens."""
    from qbench.attention import kernels
    from qbench.checkpoints import find, load_model, load_tokenizer

    found = find(checkpoint)
    ids = load_tokenizer(found)(text.read_text(), add_special_tokens=False)["input_ids"][:LENGTH]
    if len(ids) < LENGTH:
        raise DataError(f"{text}: {len(ids)} tokens; give a text of at least {LENGTH}")
    model = load_model(found, dtype=torch.bfloat16, device="cuda", attention="triton")
    seen: list[tuple[Tensor, ...]] = []
    real = kernels.attention

    def record(*inputs: Tensor, **settings: Any) -> Tensor:
        seen.append(inputs)
        return real(*inputs, **settings)

    kernels.attention = record
    try:
        with torch.no_grad():
            model(torch.tensor([ids], device="cuda"), use_cache=False)
    finally:
        kernels.attention = real
    return tuple(torch.cat(tensors) for tensors in zip(*seen, strict=True))
