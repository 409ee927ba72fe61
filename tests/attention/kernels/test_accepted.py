import inspect

import pytest
from kernel_scripts import lines_of

CALLED = ["self", "target", "options", "codegen_fns", "module_map", "context"]


def test_triton_accepts_every_kernel_and_launches_are_the_same_the_second_time():
    compiler = pytest.importorskip("triton.compiler")
    if list(inspect.signature(compiler.ASTSource.make_ir).parameters) != CALLED:
        pytest.skip("this Triton's front end is called in another way")
    lines = lines_of("accepted.py")
    assert len(lines) == 10 * 9
    for case, names, differing in lines:
        forward = "decode_kernel" if ", 1, " in case else "forward_kernel"
        assert {forward, "key_kernel", "query_kernel"} <= set(names.split(",")), case
        assert int(differing) == 0, case
