"""Decoding and packed sequences in ``qbench bench attention``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qbench import text
from qbench.attention import kernels
from qbench.attention.kernels import supported
from qbench.attention.normalizers import NORMALIZERS
from qbench.bench.attention_timing import Clock, given, random_tensor, sparse_keys

DECODE = (64, 4096, 16, 64)
PACKED = (64, 4096, 16, 64)  # sequences, most tokens of one, heads, width


def decode(
    clock: Clock, quick: bool, only: Collection[str], copied: float
) -> Iterator[dict[str, Any]]:
    """Milliseconds of one query a sequence, and TB/s of keys and values beside ``copied``, those of
    a copy; of the normalizers ``only``, or of all."""
    batch, length, heads, width = DECODE
    batch = 8 if quick else batch
    key, value = (random_tensor(batch, length, heads, width).contiguous() for _ in range(2))
    query = random_tensor(batch, 1, heads, width)
    sparse = sparse_keys(query, key)
    size = key.nbytes + value.nbytes

    def row(name: str, run: Callable[[], Tensor]) -> dict[str, Any]:
        ms = clock(run)
        shape = (batch, length, heads, width)
        rate = size / ms / 1e9
        return {"shape": shape, "kernel": name, "ms": ms, "tb_per_s": rate,
                "share_of_copy": rate / copied}  # fmt: skip

    with torch.no_grad():
        for normalizer in only or supported():
            parameters = given(normalizer, heads)
            for name, keys in (("random keys", key), ("99 % of scores negative", sparse)):
                if keys is sparse and not NORMALIZERS.get(normalizer).sparse:
                    continue
                yield row(
                    f"qbench {normalizer}, {name}",
                    lambda n=normalizer, k=keys, p=parameters: kernels.attention(
                        query, k, value, normalizer=n, parameters=p
                    ),
                )
        yield row("torch softmax", lambda: F.scaled_dot_product_attention(query, key, value))


def packed(clock: Clock, quick: bool) -> Iterator[dict[str, Any]]:
    """Milliseconds of a forward pass over sequences of many lengths, and padded to the longest."""
    sequences, longest, heads, width = PACKED
    sequences = 8 if quick else sequences
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(32, longest + 1, (sequences,), generator=generator)
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    tokens = int(cu_seqlens[-1])
    rows = [random_tensor(1, tokens, heads, width) for _ in range(3)]
    padded = [random_tensor(sequences, longest, heads, width) for _ in range(3)]
    most = int(lengths.max())
    cu_seqlens = cu_seqlens.cuda()
    runs = {
        "qbench softpick, packed": lambda: kernels.packed_attention(
            *rows, normalizer="softpick", cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
            max_seqlen_q=most, max_seqlen_k=most,
        ),
        "qbench softpick, padded to the longest": lambda: kernels.attention(
            *padded, normalizer="softpick", causal=True
        ),
    }  # fmt: skip
    with torch.no_grad():
        for name, run in runs.items():
            ms = clock(run)
            yield {"sequences": sequences, "tokens": tokens, "kernel": name, "ms": ms}


def decode_table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown."""
    cells = [
        [", ".join(map(str, row["shape"])), row["kernel"], f"{row['ms']:.3f}",
         f"{row['tb_per_s']:.2f}", f"{row['share_of_copy']:.0%}"]
        for row in rows
    ]  # fmt: skip
    head = ("B, T, H, D", "kernel", "ms", "TB/s", "of the copy")
    return [
        "",
        "Decode, one query a sequence. Bytes count all keys and values, read or skipped.",
        "",
        text.table(head, cells, align="llrrr"),
    ]


def packed_table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown."""
    cells = [[row["sequences"], row["tokens"], row["kernel"], f"{row['ms']:.3f}"] for row in rows]
    return [
        "",
        "Packed sequences of many lengths, forward.",
        "",
        text.table(("sequences", "tokens", "kernel", "ms"), cells, align="rrlr"),
    ]
