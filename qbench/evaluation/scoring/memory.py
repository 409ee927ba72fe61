"""Peak memory, and telling an out-of-memory from other errors."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable

import torch

GIB = 1024**3
BATCH_BYTES = int(1.5 * GIB)  # what a batch may take on top of the weights
FREE_PART = 0.8  # of the device's free memory: the allocator rounds up


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


def batch_tokens(
    forward: Callable[[], object], *, tokens: int, most: int, device: torch.device
) -> int:
    """Tokens that a batch may have, from what one of ``tokens`` tokens took. At most ``most``.

    The result is a multiple of 1,024 (of 64 below that), so that the same model gets the same
    batches wherever ``BATCH_BYTES`` are free.
    """
    forward()  # compiles kernels, allocates workspaces
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    forward()
    torch.cuda.synchronize(device)
    need = max(1, torch.cuda.max_memory_allocated(device) - before) / tokens
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - before
    fits = min(most, int(min(BATCH_BYTES, FREE_PART * free) / need))
    step = 1024 if fits >= 1024 else 64
    return max(step, fits - fits % step)
