"""The kernel that rotates queries and keys gives the bits of transformers' functions."""

import importlib
import os

import pytest
import torch
from transformers.models.llama import modeling_llama

pytest.importorskip("triton")
from qbench.attention.kernels import rotary

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
    wanted = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    for ours, theirs in zip(rotary.apply_rotary_pos_emb(q, k, cos, sin), wanted, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


def test_other_layouts_go_to_the_function_itself():
    q, k = torch.randn(2, 2, 5, 8, device=DEVICE), torch.randn(2, 1, 5, 8, device=DEVICE)
    cos, sin = torch.randn(2, 2, 5, 8, device=DEVICE)
    for x, y in ((q, k), (q[:1], k[:1])):  # several rows, and tokens that do not lie side by side
        wanted = modeling_llama.apply_rotary_pos_emb(x, y, cos[: len(x)], sin[: len(x)])
        found = rotary.apply_rotary_pos_emb(x, y, cos[: len(x)], sin[: len(x)])
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(
    ("name", "same"), [("llama", True), ("qwen3", True), ("gpt_neox", False), ("olmo2", False)]
)
def test_only_modules_with_llamas_functions_get_it(name, same):
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    assert rotary.replaces(module) == same
