"""Which kernels of attention really ran in a step."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

# Ours (Triton and Gluon), and those that torch's scaled_dot_product_attention may choose. What the
# compiler makes is named triton_… after all that is fused in it, and is no kernel of attention.
ATTENTION = re.compile(
    r"^(?!triton_).*(attn_fwd|attn_bwd|hopper_bwd|attn_decode|flash|fmha|sdpa|"
    r"attention)"
)


def attention_kernels(step: Callable[[], None], device: torch.device) -> list[str]:
    """Names of the attention kernels that ``step`` launches on a GPU, sorted; on a CPU, where
    none is launched, ``["none"]``. The step is done once."""
    if device.type != "cuda":
        step()
        return ["none"]
    from torch.profiler import ProfilerActivity, profile

    # Nothing is accumulated in one cycle; without it torch 2.11 warns of events that it clears.
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        step()
        torch.cuda.synchronize()
    names = {event.key for event in seen.key_averages() if event.self_device_time_total > 0}
    return sorted(name[:120] for name in names if ATTENTION.search(name))
