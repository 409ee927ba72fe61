"""Fused kernels give the bits of transformers' functions."""

import os

import pytest
import torch
from tiny import tiny_model
from transformers.models.llama import modeling_llama

pytest.importorskip("triton")
from qbench.attention.kernels import fused

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
# the interpreter cuts bfloat16 off
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def drawn(tokens, heads, width, dtype):
    rows = torch.randn(1, tokens, heads * width, device=DEVICE).to(dtype)
    return rows.view(1, tokens, heads, width).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "width"), [(50, 3, 64), (7, 2, 20), (301, 4, 128)])
def test_rotated_values_have_the_functions_bits_and_layout(tokens, heads, width, dtype):
    torch.manual_seed(tokens)
    q, k = drawn(tokens, heads, width, dtype), drawn(tokens, 2, width, dtype)
    cos, sin = torch.randn(2, 1, tokens, width, device=DEVICE).to(dtype)
    expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    for ours, theirs in zip(fused.apply_rotary_pos_emb(q, k, cos, sin), expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


def test_other_layouts_of_rotated_values_go_to_the_function_itself():
    q, k = torch.randn(2, 2, 5, 8, device=DEVICE), torch.randn(2, 1, 5, 8, device=DEVICE)
    cos, sin = torch.randn(2, 2, 5, 8, device=DEVICE)
    for x, y in ((q, k), (q[:1], k[:1])):  # several rows, and tokens that do not lie side by side
        expected = modeling_llama.apply_rotary_pos_emb(x, y, cos[: len(x)], sin[: len(x)])
        actual = fused.apply_rotary_pos_emb(x, y, cos[: len(x)], sin[: len(x)])
        assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 50, 64), (2, 7, 96), (3, 1000)], ids=str)
def test_normalized_rows_have_the_forwards_bits(shape, dtype):
    torch.manual_seed(len(shape))
    norm = modeling_llama.LlamaRMSNorm(shape[-1]).to(DEVICE, dtype).requires_grad_(False)
    norm.weight.copy_(torch.randn(shape[-1]))
    x = torch.randn(shape, device=DEVICE).mul_(3).to(dtype)
    assert torch.equal(fused.rms_norm(norm, x), norm(x))
    assert torch.equal(fused.rms_norm(norm, x[..., 1:, :]), norm(x[..., 1:, :]))
    assert torch.equal(fused.rms_norm(norm, x.double()), norm(x.double()))  # the forward itself


def mean_of_squares(x):
    """Return the mean [rows, 1] of the squares of ``x``, added up as torch does it on a GPU."""
    rows, width = x.shape
    squares = torch.nn.functional.pad(x.float() * x.float(), (0, -width % 128))
    sums = torch.zeros(rows, 32, 4)
    for chunk in squares.view(rows, -1, 32, 4).unbind(1):
        sums += chunk
    threads = sums[..., 0] + sums[..., 1] + sums[..., 2] + sums[..., 3]
    while threads.shape[1] > 1:
        threads = sum(threads.chunk(2, dim=1))
    return threads * torch.tensor(rows / (rows * width), dtype=torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [128, 576, 1024, *([2560, 4096, 8064] * (DEVICE == "cuda"))])
def test_wide_norms_add_up_as_torch_does(width, dtype):
    torch.manual_seed(width)
    norm = modeling_llama.LlamaRMSNorm(width).to(DEVICE, dtype).requires_grad_(False)
    norm.weight.copy_(torch.randn(width))
    for rows in (16, 37, *([2000] * (DEVICE == "cuda"))):
        x = torch.randn(rows, width, device=DEVICE).mul_(3).to(dtype)
        if DEVICE == "cuda":
            assert fused._adds_up_as_torch(width, x.device)
            expected = norm(x)
        else:
            factor = torch.rsqrt(mean_of_squares(x) + norm.variance_epsilon)
            expected = norm.weight * (x.float() * factor).to(dtype)
        assert torch.equal(fused._normalized(x, norm.weight, norm.variance_epsilon), expected)


def test_norms_that_torch_adds_up_otherwise_go_to_the_forward_itself():
    assert not any(fused._adds_up_as_torch(w, torch.device(DEVICE)) for w in (64, 130, 8192))
    if DEVICE == "cpu":
        assert not fused._adds_up_as_torch(1024, torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "names"),
    [("llama", {"apply_rotary_pos_emb", "forward"}), ("qwen3", {"apply_rotary_pos_emb", "forward"}),
     ("gemma3_text", {"apply_rotary_pos_emb"}), ("gpt_neox", set())],
)  # fmt: skip
def test_only_functions_that_are_llamas_are_replaced(kind, names):
    model = tiny_model(kind)
    actual = fused.replacements(model)
    assert {each.name for each in actual} == names
    for each in actual:
        each.put(each.fused)
        each.put(each.original)
    assert fused.replacements(model) == actual
