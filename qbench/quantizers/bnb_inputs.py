"""Inputs of LLM.int8's layers, quantized once for all layers that are given the same.

A block has seven linear layers and four inputs: queries, keys and values share one, gate and up
another. The library quantizes seven times and each time waits for the GPU, once to learn whether
there are outliers and once to learn where, while the GPU has nothing to do. Here which columns
have outliers comes to the CPU beside the GPU's work, and is asked for when the first product of
the codes, which does not need to know, is under way.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
import torch
from bitsandbytes import functional
from torch import Tensor


class Quantized:
    """Inputs as rows [M, K]: ``codes`` int8 [M, K] and ``scales`` float32 [M]; columns with
    outliers have codes of 0."""

    def __init__(self, codes: Tensor, scales: Tensor, columns: Tensor | None) -> None:
        """``columns``: the numbers of those with outliers, int64, or a bool for each [K]."""
        self.codes, self.scales = codes, scales
        self._columns, self._ready = columns, None
        if columns is not None and columns.dtype == torch.bool and columns.is_cuda:
            self._columns = columns.to("cpu", non_blocking=True)
            self._ready = torch.cuda.current_stream(columns.device).record_event()
        self._outliers: tuple[Tensor, Tensor] | None = None

    def outliers(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """The numbers [O] of columns with outliers, and these columns of ``rows`` [M, O], which
        were quantized; None where there are none. The first call may wait for a GPU."""
        columns, self._columns = self._columns, None
        if columns is not None:
            if self._ready is not None:
                self._ready.synchronize()
            if columns.dtype == torch.bool:
                columns = columns.nonzero().view(-1)
            if len(columns):
                columns = _moved(columns, rows.device)
                self._outliers = columns, rows[:, columns].contiguous()
        return self._outliers


class _Last(threading.local):
    """What this thread quantized last: the input's id, its version, the threshold, and the result
    in a list that is emptied as soon as the input is gone, when another may take its id."""

    known: tuple[tuple[int, int, float], list[Quantized], object] | None = None


_last = _Last()


def quantized(x: Tensor, threshold: float) -> Quantized:
    """``x`` [..., K] as the library quantizes it, or as it did at the last call of this thread
    where that was about the same tensor and nobody has written to it since. A tensor of
    ``torch.inference_mode`` does not tell that, and is always quantized."""
    if x.is_inference():
        return _quantize(x, threshold)
    if _last.known is not None:
        key, held, _ = _last.known
        if held and key == (id(x), x._version, threshold):
            return held[0]
    _last.known = None  # its memory, before more is taken
    found = _quantize(x, threshold)
    held = [found]
    key = (id(x), x._version, threshold)  # the library may write to it, and back
    _last.known = key, held, weakref.ref(x, lambda _: held.clear())
    return found


def _quantize(x: Tensor, threshold: float) -> Quantized:
    half = x.reshape(-1, x.shape[-1]).to(torch.float16)
    # The library's GPU kernel compares in float16 here and in float32 there.
    if not threshold or float(np.float16(threshold)) != threshold:
        return Quantized(*functional.int8_vectorwise_quant(half, threshold=threshold))
    outlying = half.abs() >= threshold
    columns = outlying.any(dim=0)
    codes, scales, _ = functional.int8_vectorwise_quant(half.masked_fill(outlying, 0))
    return Quantized(codes.masked_fill_(columns, 0), scales, columns)


def _moved(columns: Tensor, device: torch.device) -> Tensor:
    """Without waiting for what is queued on a GPU."""
    if columns.device == device:
        return columns
    return columns.pin_memory().to(device, non_blocking=True)
