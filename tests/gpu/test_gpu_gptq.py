"""GPTQ through gptqmodel on a GPU: our kernels for its columns and words give its bits."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "quantizers"))

from columns_loop import CASES, loop, tensors
from qbench.quantizers.gptq_words import packed
from qbench.quantizers.optimum_patches import find_scales
from quantizer_models import DIGEST, calibration, llama, settings
from test_gptq_scales import odd, quantizer
from test_gptq_words import rounded

from qbench.quantizers.gptq_columns import block_update
from qbench.quantizers.quantize import quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("case", [*CASES, (1024, 4, 1, ""), (2817, 3, 1, ""), (513, 2, 8, "")])
def test_the_kernel_of_columns_is_the_librarys_loop_to_the_bit(case):
    wanted, found = tensors(case, "cuda"), tensors(case, "cuda")
    loop(*wanted)
    block_update(*found)
    for index in (0, 5, 6, 7):
        pair = [one[index].nan_to_num(7e9) for one in (wanted, found)]
        assert torch.equal(*pair), index


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_words_are_the_same_on_every_device(bits, symmetric):
    given = rounded(bits, 256, 512, 128, symmetric, torch.bfloat16)
    here, there = packed(*given, bits), packed(*(t.cuda() for t in given), bits)
    for part, tensor in here.items():
        assert torch.equal(there[part].cpu(), tensor), part


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_are_the_librarys_and_nothing_waits_for_them(bits, symmetric, waiting_fails):
    x = odd(torch.Generator().manual_seed(bits)).cuda()
    theirs, ours = quantizer(bits, symmetric), quantizer(bits, symmetric)
    theirs.find_params(x, weight=True)
    find_scales(ours, x, weight=True)  # the number of levels goes to the GPU once
    waiting_fails()
    find_scales(ours, x, weight=True)
    torch.cuda.set_sync_debug_mode("default")
    for name in ("scale", "zero"):
        wanted, found = getattr(theirs, name), getattr(ours, name)
        assert torch.equal(found.nan_to_num(7e9), wanted.nan_to_num(7e9))


@pytest.mark.parametrize("stated", [{}, {"symmetric": False}, {"desc_act": True, "group_size": 64}])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_cells_have_the_bits_of_the_librarys_loop_and_say_what_ran(
    bits, stated, tmp_path, monkeypatch
):
    def stored(folder):
        chosen = settings(
            f"gptq-{bits}bit", **{"compute_dtype": "bfloat16", "group_size": 128, **stated}
        )
        made = quantize(
            llama("softpick", dtype=torch.bfloat16, device="cuda", hidden=128, intermediate=384),
            chosen, calibration=calibration(), digest=DIGEST, artifacts=tmp_path / folder,
        )  # fmt: skip
        return made.detail, made.model.state_dict()

    detail, ours = stored("ours")
    assert "columns in our Triton kernel" in detail
    monkeypatch.setenv("GPTQMODEL_DISABLE_GPTQ_CUDA", "1")
    detail, theirs = stored("theirs")
    assert "columns in PyTorch" in detail
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
