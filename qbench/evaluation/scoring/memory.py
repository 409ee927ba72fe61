"""Peak memory, and telling an out-of-memory from other errors."""

from __future__ import annotations

import gc
import resource
import sys

import torch

GIB = 1024**3


def is_out_of_memory(error: BaseException) -> bool:
    """True for CUDA's own class and for the CPU allocator's plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in text or "out of memory" in text
    )


def free_cached_memory(device: torch.device) -> None:
    """Gives cached blocks back, so that a smaller batch is not beaten by fragmentation."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gib(device: torch.device) -> float:
    """CUDA: most memory allocated since the last reset; CPU: most the process ever held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
