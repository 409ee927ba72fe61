"""A safetensors file and its SHA-256 in one go: a gigabyte is hashed while it is written.

The format (https://github.com/huggingface/safetensors, "Format"): the header's length in 8 bytes,
little-endian; the header, JSON filled up with spaces to a multiple of 8; the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64",
    torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip


def save_digested(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> str:
    """Write ``tensors``, which are on the CPU, and give the SHA-256 of the file in hexadecimal."""
    ordered = sorted(tensors.items(), key=lambda one: (-one[1].dtype.itemsize, one[0]))  # aligned
    header, end = {"__metadata__": metadata}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parts = [memoryview(len(text).to_bytes(8, "little") + text)]
    parts += [
        memoryview(one.contiguous().flatten().view(torch.uint8).numpy()) for _, one in ordered
    ]
    with ThreadPoolExecutor(1) as beside, path.open("wb", buffering=0) as file:
        digest = beside.submit(_digest, parts)
        for part in parts:
            while len(part):  # the system may take less than it is given
                part = part[file.write(part) :]
        return digest.result()


def _digest(parts: Iterable[memoryview]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()
