"""Models on our kernels: caches, compiling, autocast, trained parameters, the trained pair."""

from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from normalizer_parameters import attach

from qbench.attention import kernels
from qbench.attention.transformers import set_attention
from qbench.evaluation.scoring.generate import cache_argument

ROOT = Path(__file__).parents[2]
NAMES = ("softmax", "softpick", "sigmoid", "softmax-sink", "scalable-softpick")


def draw(*shape, dtype=torch.bfloat16, seed=0):
    """[B, H, T, D] in the memory of [B, T, H, D], as models have it."""
    generator = torch.Generator("cuda").manual_seed(seed)
    batch, heads, length, width = shape
    tensor = torch.randn(batch, length, heads, width, device="cuda", generator=generator)
    return tensor.to(dtype).transpose(1, 2)


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


TRAINED = [
    ("sigmoid", "bias"), ("softmax-sink", "sinks"), ("scalable-softmax", "s"),
    ("scalable-softpick-next", "s"), *((name, "slopes") for name in ("softpick", "sigmoid")),
]  # fmt: skip


@pytest.mark.parametrize(("normalizer", "name"), TRAINED)
def test_parameters_are_trained_in_a_graph_and_with_checkpointing(normalizer, name):
    """The same gradients eagerly, under activation checkpointing, and replayed as a CUDA graph."""
    inputs = [draw(2, 4, 256, 64, seed=s).requires_grad_() for s in range(3)]
    parameter = torch.linspace(-2, 1, 4, device="cuda").requires_grad_()
    sources = [*inputs, parameter]

    def run(query, key, value, parameter):
        return kernels.attention(
            query, key, value, normalizer=normalizer, parameters={name: parameter}, causal=True
        )

    gradient = draw(2, 4, 256, 64, seed=3)
    expected = torch.autograd.grad(run(*sources), sources, gradient)
    output = torch.utils.checkpoint.checkpoint(run, *sources, use_reentrant=False)
    got = torch.autograd.grad(output, sources, gradient)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    # A leaf's node of the graph of gradients keeps the stream it was made on as long as any output
    # lives, here that of the checkpoint: captured are leaves that no other stream has seen.
    sources = [source.detach().requires_grad_() for source in sources]
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(run(*sources), sources, gradient)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        replayed = torch.autograd.grad(run(*sources), sources, gradient)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(replayed, expected, strict=True))
