"""Every kernel of every normalizer through Triton's front end for a Hopper GPU, without one: what
the interpreter takes need not compile. In a process of its own, since it replaces Triton's driver.
Prints one line a case: name, kernels, and launches whose second time had other arguments."""

import torch
import triton
import triton.compiler
from hopper import TARGET, Hopper
from triton._C.libtriton import ir
from triton.compiler import make_backend
from triton.runtime import driver

LAUNCHED = []
NO, SLOPED, WIDE = "as they are", "with slopes and a soft cap", "with a wide soft cap"
CAPS = {NO: None, SLOPED: 5.0, WIDE: 50.0}  # tanh of a wide one may be a polynomial


class Compiled:
    """What a launch is made of; it notes the arguments."""

    function, packed_metadata = 0, ()

    def __init__(self, name):
        self.name = name

    def launch_metadata(self, grid, stream, *arguments):
        return None

    def run(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        LAUNCHED.append((self.name, (x, y, z), tuple(map(plain, arguments))))

    def __getitem__(self, grid):
        return lambda *arguments: self.run(*grid, 0, 0, (), None, None, None, *arguments)


def plain(argument):
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    if hasattr(argument, "block_shape"):
        return plain(argument.base), tuple(argument.shape), tuple(argument.block_shape)
    return argument


def front_end(source, target=None, options=None, **_):
    """As far as ``triton.compile`` goes before it optimizes."""
    backend = make_backend(TARGET)
    chosen = backend.parse_options(dict(options or {}))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(chosen)
    source.make_ir(TARGET, chosen, functions, backend.get_module_map(), context)
    return Compiled(source.name)


def run(normalizer, backward, queries, shaped, dtype):
    """Twice forward and backward; the kernels, and how many launches of the second time differ."""
    from normalizer_parameters import parameters

    from qbench.attention import kernels

    # At 128 sigmoid's forward is in Gluon too.
    width = 64 if shaped != NO or backward == "Triton" else 128
    query = torch.zeros(1, queries, 2, width, dtype=dtype).transpose(1, 2).requires_grad_()
    key, value = (torch.zeros_like(query[:, :, :1]).expand(1, 2, 128, width) for _ in range(2))
    key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (key, value))
    given = parameters(normalizer, 2, dtype=torch.float32, slopes=shaped == SLOPED)
    for name, tensor in given.items():  # Gluon has no gradient of s together with slopes
        tensor.requires_grad_(name != "s" or shaped == NO or backward == "Triton")
    times = []
    for _ in range(2):
        LAUNCHED.clear()
        output = kernels.attention(
            query, key, value, normalizer=normalizer, parameters=given, causal=True,
            softcap=CAPS[shaped],
        )  # fmt: skip
        output.sum().backward()
        times.append(list(LAUNCHED))
    names = sorted({name for name, *_ in times[0]})
    return names, sum(a != b for a, b in zip(*times, strict=True)) + len(times[0]) - len(times[1])


CASES = [  # by which backward kernels, dtype, queries, how scores are shaped
    ("Gluon", torch.bfloat16, 128, NO),
    ("Gluon", torch.bfloat16, 128, SLOPED),
    ("Triton", torch.bfloat16, 128, SLOPED),
    ("Triton", torch.float16, 128, SLOPED),
    ("Triton", torch.float32, 128, SLOPED),
    ("Triton", torch.bfloat16, 1, NO),
    ("Triton", torch.float32, 1, SLOPED),
    ("Gluon", torch.bfloat16, 128, WIDE),
    ("Triton", torch.bfloat16, 1, WIDE),
]


def main():
    driver.set_active(Hopper())
    triton.compiler.compile = front_end
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.set_num_threads(1)
    from qbench.attention.kernels import gluon_backward, supported

    for normalizer in supported():
        for backward, dtype, queries, shaped in CASES:
            gluon_backward.ENOUGH = 0 if backward == "Gluon" else 1 << 60
            names, other = run(normalizer, backward, queries, shaped, dtype)
            case = f"{normalizer}, {backward}, {dtype}, {queries}, {shaped}"
            print(case, ",".join(names), other, sep="\t", flush=True)


if __name__ == "__main__":
    main()
