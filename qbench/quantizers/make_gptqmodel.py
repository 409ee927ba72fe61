"""Make a quantized copy by GPTQModel: GPTQ, GPTAQ, AWQ, ParoQuant, EXL3."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor


def make(model: Path, out: Path, texts: Tensor, settings: Any) -> None:
    """Write a copy of the checkpoint in ``model`` to ``out``, by the library's own defaults."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it stops on fewer
    import torch
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from gptqmodel.quantization.config import FORMAT, METHOD, GPTAQConfig

    method: dict[str, dict[str, Any]] = {
        "gptqmodel": {},
        "gptaq": {"gptaq": GPTAQConfig()},
        "awq": {"method": METHOD.AWQ, "format": FORMAT.GEMM},
        "paroquant": {"method": METHOD.PARO, "format": FORMAT.PAROQUANT},
        "exl3": {"method": METHOD.EXL3, "format": FORMAT.EXL3},
    }
    groups = {} if settings.method == "exl3" else {"group_size": settings.group_length(0) or -1}
    config = QuantizeConfig(bits=settings.num_bits, **groups, **method[settings.method])
    rows = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in texts]
    on_cpu = settings.method == "awq" and not torch.cuda.is_available()
    quantized = GPTQModel.load(str(model), config)
    quantized.quantize(rows, batch_size=1, backend=BACKEND.AWQ_TORCH if on_cpu else BACKEND.AUTO)
    quantized.save(str(out))
