"""Models on our kernels: padding, caches, compiling and autocast."""

import pytest
import torch
from normalizer_parameters import attach

from qbench.attention.transformers import set_attention
from qbench.evaluation.scoring.generate import cache_argument

NAMES = ("softmax", "softpick", "sigmoid", "softmax-sink", "scalable-softpick")


def relative_error(got, truth):
    got, truth = got.detach(), truth.detach()
    return float((got.double() - truth.double()).norm() / truth.double().norm())


def small_model(dtype=torch.float32):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, vocab_size=101, initializer_range=0.15,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to("cuda", dtype)


@pytest.mark.parametrize("normalizer", NAMES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_model_with_a_cache_gives_what_the_reference_gives(normalizer, side):
    model = attach(small_model(), normalizer)
    ids = torch.randint(0, 101, (3, 150), device="cuda")
    padding = torch.ones_like(ids)
    for row, count in enumerate((0, 31, 140)):
        padding[row, slice(0, count) if side == "left" else slice(150 - count, 150)] = 0
    positions = (padding.cumsum(-1) - 1).clamp(min=0)
    logits = {}
    for implementation in ("reference", "triton"):
        ran = set_attention(model, normalizer=normalizer, implementation=implementation)
        assert ran == f"{normalizer}/{implementation}"
        with torch.no_grad():
            out = model(ids, attention_mask=padding, position_ids=positions, use_cache=True)
            step = model(
                ids[:, :1],
                attention_mask=torch.cat([padding, padding.new_ones(3, 1)], 1),
                position_ids=positions[:, -1:] + 1,
                **{cache_argument(type(model)): out.past_key_values},
            )  # fmt: skip
        logits[implementation] = torch.cat([out.logits[padding.bool()], step.logits[:, 0]])
    assert relative_error(logits["triton"], logits["reference"]) <= 1e-4


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("normalizer", NAMES)
@pytest.mark.parametrize("compiled", [False, True])
def test_training_under_autocast_runs_the_causal_kernels(normalizer, compiled, monkeypatch):
    """float32 queries and keys after RoPE, bf16 values; which kernels ran, and without a mask. All
    parameters that the normalizer has are trained, slopes too."""
    from qbench.attention.kernels import ops

    model = attach(small_model(), normalizer, slopes=True)
    set_attention(model, normalizer=normalizer, implementation="triton")
    asked = []
    for name in ("forward", "backward"):
        real = getattr(ops, name)

        def spy(*inputs, real=real, name=name):
            mask, seq_bounds = inputs[3:5] if name == "forward" else inputs[7:9]
            dtypes = {tensor.dtype for tensor in inputs[:3]}
            asked.append((name, mask is None and seq_bounds is None, dtypes == {torch.bfloat16}))
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
    assert asked == [("forward", True, True)] * 2 + [("backward", True, True)] * 2
    ran = {event.name for event in profile.events()}
    assert {"attn_fwd", "attn_bwd_dq", "attn_bwd_dkdv"} <= ran
    assert not any("fmha" in name or "flash" in name for name in ran)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
