"""flash-linear-attention's own modelling code gives our logits for what we wrote in its format.

Runs where that library is installed (``pip install flash-linear-attention``). Its kernels are
Triton's: on a CPU set TRITON_INTERPRET=1. Its attention is that of flash-attn, in whose place
stands torch's where it is not installed; other normalizers than softmax are the authors' fork's.
"""

from __future__ import annotations

import os

import pytest
import torch
from checkpoints.folders import CONFIG, random_tensors, write

from qbench.checkpoints import find, load_model
from qbench.checkpoints.convert import convert

VARIANTS = {
    "plain": {},
    "grouped": {"num_kv_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "norm": {"qk_norm": True, "norm_eps": 1e-5},
    "norm of another epsilon": {"qk_norm": True},  # cannot go through Qwen 3
    "bias": {"qkv_bias": True},
    "window": {"attn_impl": "flash_attn", "window_size": 5},
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def flash_attn_func(q, k, v, *, causal, window_size):
    """flash-attn's definition: [B, T, H, D], ``window_size`` keys before and after."""
    apart = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    seen = apart >= 0 if causal else torch.ones_like(apart, dtype=torch.bool)
    if window_size[0] >= 0:
        seen &= apart <= window_size[0]
    heads_first = (each.transpose(1, 2) for each in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, attn_mask=seen.to(q.device), enable_gqa=q.shape[2] != k.shape[2]
    )
    return out.transpose(1, 2)


@pytest.fixture(scope="module")
def library():
    """Its transformer, with flash-attn's definition where there is no flash-attn."""
    pytest.importorskip("triton")
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("its kernels need a GPU, or TRITON_INTERPRET=1")
    module = pytest.importorskip("fla.models.transformer", reason="no flash-linear-attention")
    layer = pytest.importorskip("fla.layers.attn")
    if layer.flash_attn_func is None:
        layer.flash_attn_func = flash_attn_func
    if DEVICE == "cpu":  # which cannot be asked for the fastest of a kernel's configurations
        from triton.runtime.autotuner import Autotuner

        run = Autotuner.run

        def first(self, *args, **kwargs):
            self.configs = self.configs[:1]
            return run(self, *args, **kwargs)

        Autotuner.run = first
    return module


@pytest.mark.filterwarnings("ignore:::fla")  # of its own modules, which are not ours to mend
@pytest.mark.parametrize("name", VARIANTS)
def test_its_code_gives_our_logits_for_what_we_wrote(tmp_path, library, name):
    config = {**CONFIG, "attn_impl": "parallel_attn", **VARIANTS[name]}
    tensors = random_tensors(config)
    if config.get("qk_norm"):  # so small that the norms' epsilon counts
        for part in ("q", "k"):
            tensors[f"model.layers.0.attn.{part}_proj.weight"] /= 100
    found = find(str(write(tmp_path / "theirs", config, tensors)))
    if "epsilon" not in name:
        convert(found, "llama", tmp_path / "llama")
        convert(find(str(tmp_path / "llama")), "fla", tmp_path / "ours")
        found = find(str(tmp_path / "ours"))
    model = library.TransformerForCausalLM.from_pretrained(found.folder, dtype=torch.float32)
    ids = torch.randint(0, 32, (2, 23), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with torch.no_grad():
        theirs = model.to(DEVICE).eval()(ids, use_cache=False).logits
        ours = load_model(found, dtype=torch.float32, device=DEVICE)(ids, use_cache=False).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)
