"""Fused kernels give the bits of transformers' functions."""

import os
from unittest import mock

import pytest
import torch
from tiny import tiny_model
from transformers import masking_utils
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
@pytest.mark.parametrize(("tokens", "heads", "width"), [(50, 3, 64), (7, 2, 20), (101, 4, 128)])
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
@pytest.mark.parametrize("width", [128, 576, *([1024, 2560, 4096, 8064] * (DEVICE == "cuda"))])
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


def test_norms_that_torch_adds_up_otherwise_go_to_the_forward_itself(monkeypatch):
    assert not any(fused._adds_up_as_torch(w, torch.device(DEVICE)) for w in (64, 130, 8192))
    norm, x = modeling_llama.LlamaRMSNorm(256).to(DEVICE), torch.randn(16, 256, device=DEVICE)
    monkeypatch.setattr(fused, "_normalized", lambda x, *_: x)
    assert torch.equal(fused.rms_norm(norm, x), norm(x))


@pytest.mark.parametrize(
    ("kind", "names"),
    [("llama", {"apply_rotary_pos_emb", "forward"}), ("qwen3", {"apply_rotary_pos_emb", "forward"}),
     ("gemma3_text", {"apply_rotary_pos_emb", "forward"}), ("gpt_neox", set())],
)  # fmt: skip
def test_only_functions_that_are_llamas_are_replaced(kind, names):
    model = tiny_model(kind)
    actual = fused.replacements(model)
    assert {each.name for each in actual} == {fused.FIND, *names}
    for each in actual:
        each.put(each.fused)
        each.put(each.original)
    assert fused.replacements(model) == actual


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_angles_of_one_row_serve_a_batch(dtype):
    q, k = (torch.cat([drawn(9, 3, 16, dtype) for _ in range(2)]) for _ in "qk")
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    for rows in (1, 2):
        cos, sin = torch.randn(2, rows, 9, 16, device=DEVICE).to(dtype)
        expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
        assert fused._rotates_as_torch(3, 16, dtype, q.device)
        with mock.patch.object(fused, "_rotated", wraps=fused._rotated) as kernel:
            assert all(map(torch.equal, fused.apply_rotary_pos_emb(q, k, cos, sin), expected))
        assert kernel.call_count == 2


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_have_the_bits_of_silu(dtype):
    mlp = tiny_model("llama").model.layers[0].mlp.to(DEVICE, dtype).requires_grad_(False)
    x = torch.randn(2, 5, mlp.gate_proj.in_features, device=DEVICE).mul_(9).to(dtype)
    assert torch.equal(fused.gated_mlp(mlp, x), mlp(x))
    gate, up = torch.randn(2, 37, 77, device=DEVICE).mul_(9).to(dtype)
    expected = torch.nn.functional.silu(gate) * up
    if DEVICE == "cuda" and dtype == torch.bfloat16:
        assert fused._gates_as_torch(dtype, gate.device)
        assert torch.equal(fused._gated(gate, up), expected)
    torch.testing.assert_close(fused._gated(gate, up), expected)


def test_no_sequences_are_looked_for_in_rows_that_hold_one():
    packed = torch.tensor([[0, 1, 0]])
    assert masking_utils.find_packed_sequence_indices(packed) is not None
    fused.ONE_EACH.put(fused.ONE_EACH.fused)
    assert masking_utils.find_packed_sequence_indices(packed) is None
    fused.ONE_EACH.put(fused.ONE_EACH.original)
