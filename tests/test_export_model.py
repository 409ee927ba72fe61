"""The model of a finished cell as a folder that other libraries load."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from published_copies import first_blocks
from quantizer_models import llama, make
from small_recipe import DEMO, run_small

from qbench import export_model as exported
from qbench.errors import UnavailableError
from qbench.export_model import bitstream, export_model
from qbench.files import cache_folder
from qbench.machine import fast_bf16
from qbench.quantizers import config_of

EQUAL = "equal the cell's to the bit"
# GPTQModel multiplies by the transposed matrix: without bfloat16 instructions PyTorch sums it in
# another order
GPTQ = EQUAL if fast_bf16() else f"({EQUAL}|0.00)"
slow = pytest.mark.slow


def measured(folder, quantizer, checkpoint="softmax", device="cpu"):
    """Return the store and the record of one finished cell of the bundled model."""
    entry = {**({"name": quantizer} if isinstance(quantizer, str) else quantizer), "label": "mine"}
    store = run_small(
        folder, "--device", device,
        checkpoints={"base": str(first_blocks(DEMO / checkpoint, folder / "two blocks"))},
        quantizers=[entry], tasks=["demo_pages"], evaluation={"limit": 1, "damage": False},
        calibration={"path": str(DEMO / "calibration.jsonl"), "samples": 8, "length": 64},
        compute_dtype="bfloat16",
    )  # fmt: skip
    (record,) = store.records()
    return store, record


class Fixed(torch.nn.Module):
    """Gives the same output for each input."""

    config, device = SimpleNamespace(vocab_size=16), torch.device("cpu")
    dtype = torch.float32

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, ids, use_cache):
        return self.output


COMPRESSED = "compressed-tensors"
ASYMMETRIC = {"name": "rtn-4bit", "symmetric": False}


def mix(layers, **more):
    return {"name": "mixed", "layers": layers, **more}


MIX_OF_GPTQ = mix({"*.0.mlp.*": "gptq-3bit", "*.mlp.*": "rtn-8bit", "*": "gptq-4bit"},
                  ignore=["*.1.self_attn.o_proj"])  # fmt: skip
# What is chosen, the folder's format, what is said of its logits, and what is exported so. What
# others compute in float16, or with activations rounded in bfloat16, differs in last bits.
QUICK = [
    (None, "gptq", GPTQ, ["gptq-4bit"]),
    (None, COMPRESSED, "0.0", [mix({"*.mlp.*": "gptq-3bit", "*.self_attn.*": "rtn-8bit"})]),
]
SLOW = [
    (None, "bitsandbytes", EQUAL, ["bnb-4bit", "bnb-8bit"]),
    ("gptq", "gptq", "0.0", [MIX_OF_GPTQ]),  # by GPTQModel, which computes rtn in float16
    (None, "gptq", "0.0", ["rtn-4bit"]),
    (None, "gptq", GPTQ, [{"name": "gptq-4bit", "desc_act": True}]),
    (None, "gptq", EQUAL, ["gptaq-3bit", "gptqmodel-4bit"]),
    (COMPRESSED, COMPRESSED, EQUAL, ["gptq-3bit"]),
    (COMPRESSED, COMPRESSED, "0.0", ["rtn-4bit"]),
    (None, COMPRESSED, EQUAL, ["nvfp4", "mxfp4", "mxfp8", "fp8-row", "fp8-matrix", "int8-row"]),
    (None, COMPRESSED, "0.0", ["w8a8-int8"]),
    (None, COMPRESSED, "0.", ["w8a8-fp8", "int8-row+int8-static-asymmetric", "w4a4-nvfp4",
                              "w4a4-mxfp4", "w8a8-mxfp8", "w8a8-fp8-tensor"]),
    (None, "hqq", "0.0", ["hqq-4bit"]),
    (None, "awq", EQUAL, ["awq-4bit"]),
    (None, "auto-round", EQUAL, [{"name": name, "iters": 2} for name in (
        "autoround-4bit", "autoround-nvfp4", "autoround-mxfp4", "autoscheme")]),
    (None, "paroquant", EQUAL, [{"name": "paroquant-4bit", "epochs": 1}]),
]  # fmt: skip
ON_GPU = [  # copies that libraries made are exported as they are
    (None, "exl3", EQUAL, ["exl3-3bit"]),
    (None, "awq", EQUAL, ["awq-4bit"]),
    (None, "gptq", EQUAL, ["gptaq-4bit", "gptqmodel-3bit"]),
    (None, "auto-round", EQUAL, ["autoround-4bit"]),
    (None, "paroquant", EQUAL, [{"name": "paroquant-4bit", "epochs": 1}]),
]
CASES = [
    pytest.param(quantizer, *rest, device, marks=marks)
    for table, device, marks in (
        (QUICK, "cpu", ()), (SLOW, "cpu", slow), (ON_GPU, "cuda", pytest.mark.gpu)
    )
    for *rest, quantizers in table
    for quantizer in quantizers
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # GPTQModel's folder
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(("quantizer", "chosen", "expected", "words", "device"), CASES)
def test_the_folder_loaded_again_is_the_cell(quantizer, chosen, expected, words, device, tmp_path):
    pytest.importorskip("auto_round" if expected == "auto-round" else "compressed_tensors")
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


def test_the_difference_of_logits_is_said_or_refused():
    few = torch.rand(1, 8, 16)
    ours, theirs = (SimpleNamespace(logits=logits) for logits in (few, few.clone()))
    theirs.logits[0, 3] += 1e-4
    model = Fixed(ours)
    measured = SimpleNamespace(model=model, record=SimpleNamespace(cell="base/mine"))
    words = "equal the cell's to the bit at 87.5% of positions: its library sums otherwise"
    assert exported.compared(measured, Fixed(theirs)) == words
    theirs.logits = few * 1.0005  # as in float16, also where the cell's own are float32
    assert exported.compared(measured, Fixed(theirs)).startswith("differ by 0.0005 of their size")
    theirs.logits = few * 1.05
    with pytest.raises(UnavailableError, match=r"by 0\.05 of their size: this format cannot hold"):
        exported.compared(measured, Fixed(theirs))


@pytest.mark.parametrize(
    ("quantizer", "chosen", "words"),
    [
        ("int8-token", None, "it has unquantized weights, for which there is no format"),
        ("rtn-4bit+kv4", None, "it quantizes the KV cache"),
        (mix({"mlp": "hqq-4bit", "self_attn": "gptq-4bit"}), None, "of mixes only those of rtn, g"),
        (mix({"model.embed_tokens": "rtn-8bit", "*": "rtn-4bit"}), None, "quantized embeddings"),
        ("nvfp4", "gptq", "the format gptq cannot hold it; choose compressed-tensors"),
        (mix({"mlp": "rtn-4bit", "*": ASYMMETRIC}), "gptq", "use --weights compressed-tensors, wh"),
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


@pytest.mark.parametrize(
    ("name", "layout"), [("int8-row", "pack-quantized"), ("w8a8-int8", "int-quantized")]
)
def test_integer_weights_are_packed_unless_inputs_are_quantized_too(name, layout):
    config = exported._compressed_config(config_of(name), ["lm_head"], ["q_proj"])
    assert config["format"] == layout
