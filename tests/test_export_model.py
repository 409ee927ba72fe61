"""The model of a finished cell as a folder that other libraries load."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from quantizer_models import llama, make
from small_recipe import DEMO, qbench, small_recipe

from qbench import export_model as exported
from qbench.errors import UnavailableError
from qbench.export_model import bitstream, export_model
from qbench.files import cache_folder
from qbench.machine import fast_bf16
from qbench.quantizers import config_of
from qbench.store import Store

EQUAL = "equal the cell's to the bit"
# GPTQModel multiplies by the transposed matrix: without bfloat16 instructions PyTorch sums it in
# another order
GPTQ = EQUAL if fast_bf16() else f"({EQUAL}|0.00)"
slow = pytest.mark.slow


def measured(folder, quantizer, checkpoint="softmax", device="cpu"):
    """Return the store and the record of one finished cell of the bundled model."""
    entry = {**({"name": quantizer} if isinstance(quantizer, str) else quantizer), "label": "mine"}
    recipe = small_recipe(
        folder, checkpoints={"base": str(DEMO / checkpoint)}, compute_dtype="bfloat16",
        quantizers=[entry], tasks=["demo_pages"], evaluation={"limit": 1, "damage": False},
        calibration={"path": str(DEMO / "calibration.jsonl"), "samples": 8, "length": 64},
    )  # fmt: skip
    assert qbench("run", recipe, "--out", folder / "out", "--device", device) == 0
    store = Store(folder / "out")
    (record,) = store.records()
    return store, record


class Fixed(torch.nn.Module):
    """Gives the same output for each input."""

    config, device = SimpleNamespace(vocab_size=16), torch.device("cpu")

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, ids, use_cache):
        return self.output


CASES = [
    ("gptq-4bit", None, "gptq", GPTQ),
    ("nvfp4", None, "compressed-tensors", EQUAL),
    (
        {"name": "mixed", "layers": {"*.mlp.*": "gptq-3bit", "*.self_attn.*": "rtn-8bit"}},
        None,
        "compressed-tensors",
        "0.0",
    ),
    # what others compute in float16, or with activations rounded in bfloat16, differs in last bits
    *(
        pytest.param(*case, marks=slow)
        for case in (
            ("bnb-4bit", None, "bitsandbytes", EQUAL),
            (
                {
                    "name": "mixed",
                    "layers": {"*.0.mlp.*": "gptq-3bit", "*.mlp.*": "rtn-8bit", "*": "gptq-4bit"},
                    "ignore": ["*.1.self_attn.o_proj"],
                },
                "gptq",
                "gptq",
                "0.0",  # by GPTQModel, which computes rtn in float16
            ),
            ("gptq-3bit", "compressed-tensors", "compressed-tensors", EQUAL),
            ("rtn-4bit", None, "gptq", "0.0"),
            ("rtn-4bit", "compressed-tensors", "compressed-tensors", "0.0"),
            *(
                (name, None, "compressed-tensors", EQUAL)
                for name in ("mxfp4", "mxfp8", "fp8-row", "fp8-matrix", "int8-row")
            ),
            ("hqq-4bit", None, "hqq", "0.0"),
            ("w8a8-fp8", None, "compressed-tensors", "0."),
            *(
                ({"name": name, "iters": 2}, None, "auto-round", EQUAL)
                for name in ("autoround-4bit", "autoround-nvfp4", "autoround-mxfp4", "autoscheme")
            ),
            ("awq-4bit", None, "awq", EQUAL),
            ("gptaq-3bit", None, "gptq", EQUAL),
            ("gptqmodel-4bit", None, "gptq", EQUAL),
            ({"name": "paroquant-4bit", "epochs": 1}, None, "paroquant", EQUAL),
            ({"name": "gptq-4bit", "desc_act": True}, None, "gptq", GPTQ),
            ("w8a8-int8", None, "compressed-tensors", "0.0"),
            ("int8-row+int8-static-asymmetric", None, "compressed-tensors", "0."),
            *(
                (name, None, "compressed-tensors", "0.")
                for name in ("w4a4-nvfp4", "w4a4-mxfp4", "w8a8-mxfp8", "w8a8-fp8-tensor")
            ),
            ("bnb-8bit", None, "bitsandbytes", EQUAL),
        )
    ),
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # GPTQModel's folder
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(("quantizer", "chosen", "expected", "words"), CASES)
def test_the_folder_loaded_again_is_the_cell(quantizer, chosen, expected, words, tmp_path):
    pytest.importorskip("compressed_tensors")
    require_folder_of_the_cell(quantizer, chosen, expected, words, tmp_path, "cpu")


# copies that libraries made are exported as they are
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("quantizer", "expected"),
    [
        ("exl3-3bit", "exl3"),
        ("awq-4bit", "awq"),
        ("gptaq-4bit", "gptq"),
        ("gptqmodel-3bit", "gptq"),
        ("autoround-4bit", "auto-round"),
        ({"name": "paroquant-4bit", "epochs": 1}, "paroquant"),
    ],
)
def test_the_copy_of_a_library_made_on_a_gpu_is_exported(quantizer, expected, tmp_path):
    require_folder_of_the_cell(quantizer, None, expected, EQUAL, tmp_path, "cuda")


def require_folder_of_the_cell(quantizer, chosen, expected, words, tmp_path, device):
    if expected == "auto-round":
        pytest.importorskip("auto_round")
    store, record = measured(tmp_path, quantizer, device=device)
    line = export_model(store, record, tmp_path / "model", cache_folder(), chosen)
    assert line.startswith(f"base/mine: {expected}; weights: ")
    assert "artifact reused" in line or "from the cache" in line
    assert re.search(f"loaded again, its logits (differ by )?{words}", line)
    card = (tmp_path / "model" / "README.md").read_text()
    assert record.key in card
    assert record.audit.digest in card
    assert "demo_pages" in card


@pytest.mark.usefixtures("own_cache")
def test_a_softpick_cell_keeps_its_attention_and_lost_weights_are_computed_again(tmp_path):
    store, record = measured(tmp_path, "rtn-4bit", "softpick")
    for file in (cache_folder() / "artifacts").rglob("*.safetensors"):
        file.write_bytes(b"")
    line = export_model(store, record, tmp_path / "model", cache_folder())
    assert "made again: round to nearest" in line
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["qbench_normalizer"] == "softpick"
    assert "attends with softpick" in (tmp_path / "model" / "README.md").read_text()


def test_logits_that_differ_at_few_positions_are_said_so(monkeypatch):
    few = torch.rand(1, 8, 16)
    ours, theirs = (SimpleNamespace(logits=logits) for logits in (few, few.clone()))
    theirs.logits[0, 3] += 1e-4
    monkeypatch.setattr(exported, "rounding_tolerance", lambda model: 0.01)
    model = Fixed(ours)
    measured = SimpleNamespace(model=model, record=SimpleNamespace(cell="base/mine"))
    words = "equal the cell's to the bit at 87.5% of positions: its library sums otherwise"
    assert exported.compared(measured, Fixed(theirs)) == words


@pytest.mark.parametrize(
    ("quantizer", "chosen", "words"),
    [
        ("int8-token", None, "it has unquantized weights, for which there is no format"),
        ("rtn-4bit+kv4", None, "it quantizes the KV cache"),
        (
            {"name": "mixed", "layers": {"mlp": "hqq-4bit", "self_attn": "gptq-4bit"}},
            None,
            "no format can hold it; of mixes only those of rtn, gptq",
        ),
        (
            {"name": "mixed", "layers": {"model.embed_tokens": "rtn-8bit", "*": "rtn-4bit"}},
            None,
            "no format holds quantized embeddings",
        ),
        ("nvfp4", "gptq", "the format gptq cannot hold it; choose compressed-tensors"),
        (
            {
                "name": "mixed",
                "layers": {"mlp": "rtn-4bit", "*": {"name": "rtn-4bit", "symmetric": False}},
            },
            "gptq",
            "use --weights compressed-tensors, which alone holds symmetric",
        ),
    ],
)
def test_what_no_format_holds_is_refused(quantizer, chosen, words, tmp_path, monkeypatch):
    config = config_of(quantizer, compute_dtype="bfloat16")
    loaded = SimpleNamespace(
        model=make(config, tmp_path, model=llama(dtype=torch.bfloat16)),
        cell=SimpleNamespace(quantization=config),
        tokenizer=SimpleNamespace(save_pretrained=lambda folder: None),
    )
    monkeypatch.setattr("qbench.export_model.load_measured", lambda *_: loaded)
    record = SimpleNamespace(cell="base/mine", key_parts={"device": "cpu"})
    with pytest.raises(UnavailableError, match=words):
        export_model(None, record, tmp_path / "model", tmp_path, chosen)
    assert not (tmp_path / "model").exists()


def test_codes_are_packed_as_gptq_packs_them():
    codes = torch.arange(32, dtype=torch.uint8)[None] % 8
    (words,) = bitstream(codes, 3).tolist()
    whole = sum(int(code) << 3 * place for place, code in enumerate(codes[0]))
    assert [word & 0xFFFFFFFF for word in words] == [whole >> 32 * n & 0xFFFFFFFF for n in range(3)]
