"""Kernels of Hopper, compiled for sm_90 without a GPU in a process of its own. Prints one line a
kernel: name, registers a thread, bytes that it spills, whether products wait for each other, and
whether it is the precise one.
"""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton.compiler
from hopper import TARGET, Hopper
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

from qbench.attention.kernels import gluon_backward, gluon_ways, launch, modes, tiles
from qbench.attention.kernels.settings import NONE, Parameters, Settings

LENGTH = 512
compile_for = triton.compiler.compile
found = []


class Compiled:
    """A kernel that does nothing."""

    function, packed_metadata = 0, ()

    def launch_metadata(self, *_):
        return None

    def run(self, *_):
        pass

    def __getitem__(self, _):
        return lambda *_: None


def compiled(source, target=None, options=None, **_):
    kernel = compile_for(source, target=TARGET, options=options)
    found[-1] = (kernel.metadata.name, *found[-1])
    return Compiled()


def assembled(backend, source, *_):
    """Notes what the assembler says of it; gives no machine code."""
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(source)
        file.flush()
        asked = [ptxas, "-v", "-arch=sm_90a", file.name, "-o", os.devnull]
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)[1]
    spilled = re.search(r"(\d+) bytes spill stores", said)[1]
    found.append((registers, spilled, str("serialized" in said)))
    return b""


def pretend():
    """That there is an H200."""
    driver.set_active(Hopper())
    triton.compiler.compile = compiled
    CUDABackend.make_cubin = assembled
    launch.prepare_thread = lambda device: None
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)
    torch.cuda.is_current_stream_capturing = lambda: False


def inputs(width):
    return [torch.zeros(1, LENGTH, 2, width, dtype=torch.bfloat16).transpose(1, 2)] * 4


SHAPES = {  # of scores: normalizers' prefix, parameters, soft cap
    0: ("", {}, 0.0),
    modes.SCALED.value: ("scalable-", {"s": torch.zeros(2)}, 0.0),
    modes.CAPPED.value: ("", {}, 50.0),
    modes.SLOPED.value: ("", {"slopes": torch.zeros(2)}, 0.0),
}


def settings(normalizer, width, softcap):
    return Settings(normalizer, width**-0.5, softcap, True, 0, LENGTH, LENGTH)


def kernels():
    for width, kind in tiles.LASTING.items():
        tiles.LASTING[width] = replace(kind, shortest=0)
        query, key, value, _ = inputs(width)
        launch._forward(query, key, value, None, None, NONE, settings("softmax", width, 50.0))
        yield f"soft cap {width}"
    gluon_backward.ENOUGH = 0
    for family, width, shape in {**gluon_ways.QUERIES, **gluon_ways.KEYS}:
        prefix, parameters, softcap = SHAPES[shape]
        query, key, value, gradient = inputs(width)
        output, lse = launch.empty_output(query, value, covered=True)
        flags = launch.empty_flags(query, key, family)
        launch._backward(
            gradient, query, key, value, output, lse, flags, None, None, Parameters(**parameters),
            settings(prefix + family, width, softcap),
        )  # fmt: skip
        yield f"{family} {width} {shape}, backward"


if __name__ == "__main__":
    torch.set_num_threads(1)
    pretend()
    for name in kernels():
        for place, kernel in enumerate(found):
            kind = "precise" if place == 2 else "usual"
            print("\t".join((name, *kernel, kind)), flush=True)
        found.clear()
    sys.exit(0)
