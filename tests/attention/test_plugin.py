"""A normalizer from one file outside the package works wherever one is named."""

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qbench.attention.implementation import choose
from qbench.attention.normalizers import NORMALIZERS
from qbench.attention.transformers import attend
from qbench.checkpoints import find
from qbench.checkpoints.load import load_model
from qbench.errors import UnavailableError
from qbench.plan import plan
from qbench.recipe import Recipe

DEMO = Path(__file__).parents[2] / "recipes" / "demo"


@pytest.fixture(scope="module", autouse=True)
def toy():
    """Registered when the tests run: tables of other files are of the package's own."""
    importlib.import_module("plugins.toy_normalizer")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, vocab_size=61, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def test_a_checkpoint_states_it(model, tmp_path):
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"qbench_normalizer": "toy"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = find(str(tmp_path))
    assert checkpoint.normalizer == "toy"
    loaded = load_model(checkpoint, dtype=torch.float32, device="cpu")
    attend(model, normalizer="toy")
    ids = torch.arange(9)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    with pytest.raises(UnavailableError, match="no kernels for the normalizer 'toy'"):
        load_model(checkpoint, dtype=torch.float32, device="cpu", attention="triton")


@pytest.mark.parametrize(
    ("normalizer", "wanted", "device", "chosen"),
    [
        ("toy", "auto", "cuda", "reference"),
        ("toy", "auto", "cpu", "reference"),
        ("toy", "reference", "cuda:1", "reference"),
        ("softpick", "auto", "cuda:1", "triton"),
        ("softpick", "auto", "cpu", "reference"),
        ("softpick", "triton", "cuda", "triton"),
    ],
)
def test_auto_is_triton_only_where_there_are_kernels(normalizer, wanted, device, chosen):
    assert choose(normalizer, wanted, device) == chosen


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_triton_refuses_it_by_name(device):
    with pytest.raises(UnavailableError, match="no kernels for the normalizer 'toy'"):
        choose("toy", "triton", device)


@pytest.mark.parametrize("normalizer", ["softmax", "toy"])
def test_a_cells_key_holds_the_file_of_a_normalizer_from_outside(model, tmp_path, normalizer):
    model.save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    stated = json.loads(config.read_text()) | {"qbench_normalizer": normalizer}
    config.write_text(json.dumps(stated))
    shutil.copy(DEMO / "softpick" / "tokenizer.json", tmp_path / "model")
    recipe = {
        "name": "toy",
        "checkpoints": {"toy": "model"},
        "quantizers": ["fp32"],
        "compute_dtype": "float32",
        "tasks": ["demo_pages"],
        "definitions": str(DEMO / "tasks"),
        "data": str(DEMO / "data"),
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    (cell,) = plan(Recipe.load(tmp_path / "recipe.yaml"), device="cpu").cells
    assert cell.attention == "reference"
    assert cell.key_parts["normalizer"] == normalizer
    assert cell.key_parts.get("normalizer source") == NORMALIZERS.get(normalizer).source
