"""Time how fast transformers' ``generate`` answers with the models of finished cells."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qbench import bench
from qbench.bench import timed
from qbench.errors import QbenchError
from qbench.export_model import load_measured
from qbench.files import write_page
from qbench.machine import environment
from qbench.quantizers.published import LIBRARIES
from qbench.records import Record
from qbench.store import Store

PROMPT, WARM_UP = 128, 8  # tokens


class TokenTimes:
    """A streamer for transformers' ``generate``: keeps when it has the prompt and each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Tensor) -> None:  # on the CPU: the GPU is done with them
        """Keep the time at which ``generate`` hands over the prompt, and then each token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing, at the end of the answer."""


def bench_cells(
    store: Store,
    records: Sequence[Record],
    cache: Path,
    *,
    device: str,
    tokens: int,
    log: Callable[[str], None],
    out: Path | None = None,
) -> dict[str, Any]:
    """Time one greedy answer of ``tokens`` new tokens to a prompt of ``PROMPT``, batch size 1, by
    each cell of ``records``. Returns the environment and a row per cell; ``log`` gets its line, or
    the reason why a cell cannot be loaded, which then has no row. The file ``out`` gets the results
    after each row, so that a stopped command leaves them. Tokens/s are those of the median token
    after the first: what is compiled, allocated or computed by others meanwhile slows some of them.
    ``quartiles`` of tokens/s tell how evenly it ran."""
    sizes = {"prompt": PROMPT, "tokens": tokens, "batch_size": 1}
    results = {**sizes, "environment": environment(device, LIBRARIES).model_dump(), "rows": []}
    for record in records:
        try:
            measured = load_measured(store, record, cache, device)
        except QbenchError as error:
            log(f"not timed: {error}")
            continue
        ids = torch.arange(PROMPT, device=device)[None] * 7 % measured.model.config.vocab_size
        answer = partial(
            measured.model.generate, ids, attention_mask=torch.ones_like(ids), do_sample=False
        )
        answer(min_new_tokens=WARM_UP, max_new_tokens=WARM_UP)
        new_tokens = {"min_new_tokens": tokens, "max_new_tokens": tokens}
        streamer = TokenTimes()
        _, spent = timed(device, partial(answer, streamer=streamer, **new_tokens))
        low, middle, high = 1 / np.quantile(np.diff(streamer.times[1:]), (0.75, 0.5, 0.25))
        row = {"cell": record.cell, **spent, "tokens_per_second": middle, "quartiles": [low, high]}
        log(f"{row['cell']}: {middle:.1f} tokens/s [{low:.1f}, {high:.1f}]")
        results["rows"].append(row)
        if out is not None:
            write_page(out, results, table(results))
    return results


def table(results: dict[str, Any]) -> str:
    """Return the results as text: a line per cell with its speed and peak memory."""
    return bench.table(
        results["rows"],
        {"cell": ("cell", ""), "tokens/s": ("tokens_per_second", ".1f"),
         "peak GiB": ("peak_gib", ".3f")},
    )  # fmt: skip
