"""The page on attention in one's own code does what it says."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "attention.md"


@pytest.fixture
def blocks():
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_ten_lines_train_and_generate_with_softpick(blocks, capsys):
    torch.manual_seed(0)
    done = {}
    exec(blocks[0], done)
    assert capsys.readouterr().out.strip() == "to be or not to be, that is the question"
    assert done["model"].config._attn_implementation == "qbench-softpick-reference"
    model = done["model"]
    model.set_attn_implementation("sdpa")
    exec(blocks[1].replace("triton", "reference"), {"model": model})
    again = model.generate(done["ids"][:, :6], max_new_tokens=34, do_sample=False, pad_token_id=0)
    assert torch.equal(again, done["out"])


def test_every_name_of_a_normalizer_is_known_to_transformers(blocks):
    from transformers import AttentionInterface

    from qbench.attention.normalizers import NORMALIZERS

    exec(blocks[1].splitlines()[0], {})
    for name in NORMALIZERS:
        if name != "toy":
            assert f"qbench-{name}-triton" in AttentionInterface().valid_keys()
