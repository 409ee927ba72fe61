"""What a pretended processor shows to the libraries, and that bitsandbytes is right on each.

``make test PROCESSOR=avx2`` runs everything so. Here each library tells what it sees, in a process
of its own, since each looks once.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
AS = Path(__file__).parent / "as"
BELIEVED = {  # torch's own paths, oneDNN's words for its, and the bfloat16 path of bitsandbytes
    "avx512": {"torch": "AVX512", "onednn": "AVX-512", "bf16": False, "amx": False},
    "avx2": {"torch": "AVX2", "onednn": "AVX2", "bf16": False, "amx": False},
}
LOOK = """
import json, sys, torch
from bitsandbytes.nn.modules import has_avx512bf16
from test_bnb import layer_of
from qbench.quantizers import bnb

torch.nn.functional.conv2d(torch.ones(1, 64, 32, 32), torch.ones(64, 64, 3, 3))  # by oneDNN
worst = 0.0
for width in (16, 32, 48, 64):
    layer, module = layer_of(width, dtype=torch.bfloat16)
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    for _ in range(2):
        expected = x.float() @ bnb.decode(module).T
        worst = max(worst, float((module(x).float() - expected).norm() / expected.norm()))
        error = (bnb.decode(module) - layer.weight.float()).norm() / layer.weight.norm()
        assert 0.05 < error < 0.15, (width, float(error))
print(json.dumps({
    "torch": torch.backends.cpu.get_cpu_capability(),
    "bf16": bool(has_avx512bf16()) or torch.cpu._is_avx512_bf16_supported(),
    "amx": torch.cpu._is_amx_tile_supported(),
    "off": worst,
}))
"""


@functools.cache
def run_as(processor, code):
    """Standard output of Python; skips where this machine cannot pretend the ``processor``."""
    folders = [str(ROOT), str(ROOT / "tests" / "quantizers")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "ONEDNN_VERBOSE": "1"}
    if processor is not None and "PROCESSOR" in environment:
        environment.pop("LD_PRELOAD", None)  # pretended for this whole run, maybe as another
    command = [] if processor is None else [str(AS), processor]
    done = subprocess.run([*command, sys.executable, "-c", code], env=environment, text=True,
                          capture_output=True, check=False)  # fmt: skip
    if done.returncode == 2 and processor is not None:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return done.stdout


def seen(processor):
    lines = run_as(processor, LOOK).splitlines()
    onednn = next((line.split("isa:")[1] for line in lines if "isa:" in line), "")
    return {**json.loads(lines[-1]), "onednn": onednn}


@pytest.mark.slow
@pytest.mark.parametrize("processor", BELIEVED)
def test_the_libraries_see_the_pretended_processor(processor):
    found, features = seen(processor), seen(None)["torch"]
    if processor == "avx512" and features != "AVX512":
        pytest.skip("this processor has no AVX-512 to leave")
    for library, expected in BELIEVED[processor].items():
        assert expected in found[library] if library == "onednn" else found[library] == expected
    if processor == "avx2":
        assert "AVX-512" not in found["onednn"]


@pytest.mark.slow
@pytest.mark.parametrize("processor", [None, *BELIEVED])
def test_bitsandbytes_multiplies_by_what_it_stores_at_every_width(processor):
    assert seen(processor)["off"] < 1e-2


@pytest.mark.parametrize("arguments", [[], ["sse2", "true"]])
def test_an_unknown_processor_is_refused_in_one_line(arguments):
    done = subprocess.run([AS, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"PROCESSOR={''.join(arguments[:1])}: say avx512 or avx2"]
