"""A safetensors file that is hashed while it is written."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qbench.evaluation.scoring.digested import DTYPES, save_digested

TENSORS = {
    "rows": torch.arange(35).reshape(7, 5).to(torch.bfloat16),
    "part of another": torch.arange(40).reshape(4, 10).float()[:, ::2],
    "empty": torch.empty(0),
    "0.length": torch.tensor([3, 1, 2]),
    "0.token": torch.tensor([7, 8, 9], dtype=torch.int32),
} | {str(dtype): torch.ones(3, dtype=dtype) for dtype in DTYPES}


def test_the_file_is_what_the_library_reads_and_the_digest_is_its_own(tmp_path):
    path = tmp_path / "x.safetensors"
    digest = save_digested(TENSORS, path, {"about": '{"key": "é"}'})
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"about": '{"key": "é"}'}
    theirs = tmp_path / "theirs.safetensors"
    contiguous = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    save_file(contiguous, theirs, {"about": '{"key": "é"}'})
    assert abs(theirs.stat().st_size - path.stat().st_size) < 64


def test_a_full_disk_is_an_error():
    with pytest.raises(OSError, match="No space left"):
        save_digested(TENSORS, Path("/dev/full"), {})
