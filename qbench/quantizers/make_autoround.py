"""Make a quantized copy by auto-round: integers, NVFP4 or MXFP4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor


def make(model: Path, out: Path, texts: Tensor, settings: Any) -> None:
    """Write a copy of the checkpoint in ``model`` to ``out``, in auto-round's own format."""
    import torch
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    integers = settings.method == "autoround" and hasattr(settings, "group_size")
    scheme: dict[str, Any] = (
        {"bits": settings.num_bits, "group_size": settings.group_length(0) or -1}
        if integers
        else {"scheme": settings.element.upper()}
    )
    library = AutoRound(
        str(model),
        AutoTokenizer.from_pretrained(model),
        dataset=[row[None] for row in texts],
        iters=settings.iters,
        nsamples=len(texts),
        seqlen=texts.shape[1],
        device_map="cuda" if torch.cuda.is_available() else "cpu",
        **scheme,
    )
    library.quantize_and_save(str(out), format="auto_round")
    (inner,) = [config.parent for config in out.rglob("config.json")]
    for file in list(inner.iterdir()) if inner != out else ():
        file.rename(out / file.name)  # it writes a folder named by the scheme
    if inner != out:
        inner.rmdir()
