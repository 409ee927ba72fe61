"""Kernels through Triton's compiler for a Hopper GPU, without one: what the interpreter takes need
not compile. In a process of its own, since it replaces Triton's driver. Prints a line a kernel."""

import os
import sys
import tempfile

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton.compiler
from attention_cases import Case, parameters
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver

TARGET = GPUTarget("cuda", 90, 32)
LENGTH = 512
found = []
compile_whole = triton.compiler.compile


class Hopper:
    """A driver that has a device, and nothing that runs on it."""

    def get_current_target(self):
        return TARGET

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


class Compiled:
    """A kernel that does nothing."""

    function, packed_metadata = 0, ()

    def launch_metadata(self, *_):
        return None

    def run(self, *_):
        pass

    def __getitem__(self, _):
        return lambda *_: None


def front_end(source, target=None, options=None, **_):
    """As far as ``triton.compile`` goes before it optimizes."""
    backend = make_backend(TARGET)
    chosen = backend.parse_options(dict(options or {}))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(chosen)
    source.make_ir(TARGET, chosen, functions, backend.get_module_map(), context)
    found.append(source.name)
    return Compiled()


def whole(source, target=None, options=None, **_):
    """All of ``triton.compile``, down to machine code."""
    compile_whole(source, TARGET, options)
    found.append(source.name)
    return Compiled()


def run(case, dtype=torch.bfloat16):
    """Forward and backward, nothing computed."""
    from qbench.attention import kernels

    batch, heads, kv_heads, queries, keys, width = case.shape
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    tensors = [torch.zeros(batch, t, h, width, dtype=dtype).transpose(1, 2) for h, t in sizes]
    given = parameters(case)
    for tensor in (*tensors, *given.values()):
        tensor.requires_grad_()
    if case.slopes and "s" in given:  # the Hopper kernels have no gradient of s beside slopes
        given["s"].requires_grad_(False)
    output = kernels.attention(
        *tensors, normalizer=case.normalizer, parameters=given, causal=True, softcap=case.softcap,
        window=case.window,
    )  # fmt: skip
    output.sum().backward()


def every_kernel(normalizers):
    for normalizer in normalizers:
        cases = (
            (True, LENGTH, {"slopes": True}, torch.bfloat16),
            (True, LENGTH, {}, torch.bfloat16),
            (False, LENGTH, {"slopes": True, "softcap": 50.0, "window": 9}, torch.bfloat16),
            (False, LENGTH, {"softcap": 5.0}, torch.float16),
            (False, 1, {}, torch.bfloat16),
        )
        whole = normalizer in ("softmax", "softpick", "rectified", "sigmoid")
        for hopper, queries, settings, dtype in cases if whole else cases[:1]:
            shape = (1, 2, 1, queries, LENGTH, 64 if settings else 128)
            yield Case(normalizer=normalizer, shape=shape, **settings), hopper, dtype


def wide_decode():
    """Of the widest heads as many rows as a warpgroup multiplies, with values to leave out."""
    from qbench.attention import kernels

    triton.compiler.compile = whole
    shapes = ((1, 2, 32, 256), (1, 1, 512, 256), (1, 1, 512, 256))
    tensors = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    kernels.attention(*tensors, normalizer="softpick", causal=True)


def main(*normalizers):
    driver.set_active(Hopper())
    triton.compiler.compile = front_end
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.set_num_threads(1)
    from qbench.attention.kernels import hopper

    if normalizers == ("wide decode",):
        wide_decode()
        print(*found, sep="\t")
        return
    for case, on_hopper, dtype in every_kernel(normalizers):
        hopper.MIN_WORK = 0 if on_hopper else 1 << 60
        run(case, dtype)
        for kernel in found:
            print(f"{case}\t{kernel}", flush=True)
        found.clear()


if __name__ == "__main__":
    main(*sys.argv[1:])
