"""Training on our kernels under autocast, compiled and not. Padding and caches on them:
test_gpu_models.py and test_gpu_generation.py."""

import pytest
import torch
from normalizer_parameters import attach
from tiny import tiny_model

from qbench.attention.transformers import set_attention

NAMES = ("softmax", "softpick", "sigmoid", "softmax-sink", "scalable-softpick")


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("normalizer", NAMES)
@pytest.mark.parametrize("compiled", [False, True])
def test_training_under_autocast_runs_the_causal_kernels(normalizer, compiled, monkeypatch):
    """float32 queries and keys after RoPE, bf16 values; which kernels ran, and without a mask. All
    parameters that the normalizer has are trained, slopes too."""
    from qbench.attention.kernels import ops

    model = tiny_model("llama", num_hidden_layers=2).requires_grad_(True).cuda()
    attach(model, normalizer, slopes=True)
    set_attention(model, normalizer=normalizer, implementation="triton")
    calls = []
    for name in ("forward", "backward"):
        real = getattr(ops, name)

        def spy(*inputs, real=real, name=name):
            mask, seq_bounds = inputs[3:5] if name == "forward" else inputs[7:9]
            dtypes = {tensor.dtype for tensor in inputs[:3]}
            calls.append((name, mask is None and seq_bounds is None, dtypes == {torch.bfloat16}))
            return real(*inputs)

        monkeypatch.setattr(ops, name, spy)
    run = torch.compile(model, fullgraph=True) if compiled else model
    ids = torch.randint(0, 101, (2, 200), device="cuda")
    activities = [torch.profiler.ProfilerActivity.CUDA]
    profiled = torch.profiler.profile(activities=activities, acc_events=True)
    with profiled as profile:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = run(ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.cuda.synchronize()
    assert calls == [("forward", True, True)] * 2 + [("backward", True, True)] * 2
    ran = {event.name for event in profile.events()}
    assert {"attn_fwd", "attn_bwd_dq", "attn_bwd_dkdv"} <= ran
    assert not any("fmha" in name or "flash" in name for name in ran)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
