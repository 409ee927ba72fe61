"""Kernels run on a CPU by Triton's interpreter, which tests/conftest.py asks for where there is no
GPU; on one, tests/gpu runs them."""

import importlib.util
import os

if os.environ["TRITON_INTERPRET"] != "1" or importlib.util.find_spec("triton") is None:
    collect_ignore = ["test_kernels.py"]
