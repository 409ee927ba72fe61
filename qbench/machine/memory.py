"""A process whose address space is bounded (``ulimit -v``, some batch systems). No torch.

Libraries behave badly there: OpenBLAS asks for its buffers again and again, for ever, and others
end the process. So too little is refused before they are imported, and what they will need is taken
while there is room.
"""

from __future__ import annotations

import os
import resource

from qbench.errors import UnavailableError

LEAST = 1 << 30  # bytes of address space; numpy, scipy, pandas and pyarrow map two thirds of it


def settle_memory() -> None:
    """One thread of OpenBLAS where memory is bounded: each has a buffer. Read on its import."""
    if _bound() is not None:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def require_memory() -> None:
    """Raises UnavailableError where the bound leaves no room for the libraries that compute."""
    bound = _bound()
    if bound is None:
        return
    if bound < LEAST:
        raise UnavailableError(
            f"address space is bounded to {bound / 2**20:,.0f} MiB (ulimit -v), and this needs "
            f"{LEAST / 2**20:,.0f} MiB or more; say ulimit -v unlimited"
        )
    import numpy as np

    square = np.ones((64, 64))
    square @ square  # OpenBLAS takes its buffer now, and would wait for it for ever later


def _bound() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft
