"""Copies that a library makes for a cell."""

import importlib.util
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from loading import save_as_transformers
from published_copies import copy_of, original
from safetensors.torch import load_file
from small_recipe import DEMO, qbench, small_recipe

from qbench import made_copy, plugins
from qbench.attention.transformers import attention_name
from qbench.checkpoints import find
from qbench.checkpoints.load import rotate_pairs
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.errors import QuantizationError, RecipeError, UnavailableError
from qbench.export_model import export_model
from qbench.files import cache_folder
from qbench.machine import versions
from qbench.plan import plan
from qbench.quantizers import gguf_file
from qbench.quantizers.calibration import Calibration, read_calibration
from qbench.quantizers.methods import by_llamacpp
from qbench.quantizers.registry import METHODS, settings_of
from qbench.quantizers.texts import CalibrationText
from qbench.recipe import Recipe
from qbench.store import Store

CALIBRATION = {"path": str(DEMO / "calibration.jsonl"), "samples": 16, "length": 64}


def recipe_of(folder, *quantizers, checkpoint="softmax"):
    return small_recipe(folder, checkpoints={"base": str(DEMO / checkpoint)},
                        quantizers=["fp32", *quantizers], tasks=["demo_pages"],
                        calibration=CALIBRATION)  # fmt: skip


@pytest.mark.parametrize(
    ("quantizer", "checkpoint", "words"),
    [
        ("exl3-4bit", "softmax", "exl3-4bit: gptqmodel needs a GPU here; run it on one"),
        ("gguf-q8_0", "softpick", "xllamacpp computes softmax, but .* was trained with softpick"),
        ("gguf-q4_k", "softmax", "gguf-q4_k: groups of 256 do not divide the inputs of .*; take"),
        ("gguf-q4_k_m", "softmax", "gguf-q4_k_m: no program llama-quantize; .*or take gguf-q4_k,"),
        ("awq-4bit:ignore=[o_proj]", "softmax", "unknown option 'ignore'"),
        ("command:command=cp", "softmax", r"command: must contain .*\{model\}"),
        ("command:command=gone {model} {out}", "softmax", "command: no program gone"),
        ("autoround-4bit", "softmax", r"is not installed; pip install -e '\.\[autoround\]'"),
        ("awq-4bit:group_size=96", "softmax", "groups of 96 do not divide the inputs of"),
    ],
)
def test_what_no_library_can_make_is_refused_when_planned(
    quantizer, checkpoint, words, tmp_path, monkeypatch
):
    if quantizer.startswith("gguf"):
        pytest.importorskip("xllamacpp")
    spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "auto_round" else spec(name)
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    recipe = recipe_of(tmp_path, quantizer, checkpoint=checkpoint)
    with pytest.raises(RecipeError, match=words):
        plan(Recipe.load(recipe), device="cpu")


def test_exl3_refuses_a_layer_of_no_whole_blocks():
    settings_of("exl3-4bit").check_layers({"wide": (384, 1024)})
    words = r"groups of 128 do not divide the outputs of q_proj \(576\)"
    with pytest.raises(QuantizationError, match=words):
        settings_of("exl3-4bit").check_layers({"q_proj": (576, 512)})


def test_a_library_that_fails_is_said_in_a_line_with_its_log(tmp_path, monkeypatch):
    def fail(command, *, stdout, **_):
        stdout.write("working\nValueError: no such folder\n\n")
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(made_copy.subprocess, "run", fail)
    cell = SimpleNamespace(
        checkpoint=SimpleNamespace(folder=tmp_path / "gone", normalizer="softmax")
    )
    calibration, log = Calibration(ids=torch.zeros(1, 8, dtype=torch.int64)), tmp_path / "made.log"
    maker = settings_of("awq-4bit", {"group_size": 64})
    words = f"awq-4bit: gptqmodel failed: ValueError: no such folder; see its log: {log}"
    with pytest.raises(QuantizationError, match=words):
        made_copy._make(cell, maker, calibration, tmp_path / "out", "cpu", log)
    assert "no such folder" in log.read_text()


PLUGIN = """
import shutil
from qbench.quantizers.config import settings
from qbench.quantizers.methods.library_made import LibraryMade, maker


@maker("mine-8bit", "the copy in a folder")
@settings
class Mine(LibraryMade):
    method, title, requirements = "mine", "Mine", ("shutil",)
    needs_calibration, num_bits, scheme = False, 8, "fp8"
    folder: str


def make(model, out, texts, settings):
    shutil.copytree(settings.folder, out, dirs_exist_ok=True)
"""


@pytest.mark.usefixtures("own_cache")
def test_a_command_and_a_plugin_write_copies(tmp_path, monkeypatch):
    """In this process; those of libraries, which are slow, start one of their own."""
    run = made_copy.subprocess.run

    def as_in_a_new_process(command, **options):
        if "qbench.made_copy" not in command:
            return run(command, **options)
        monkeypatch.delitem(plugins._loaded, "qbench_plugin_mine")
        monkeypatch.delitem(METHODS, "mine-8bit")
        made_copy.main(json.loads(command[-1].read_bytes()))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(made_copy.subprocess, "run", as_in_a_new_process)
    (plugin := tmp_path / "mine.py").write_text(PLUGIN)
    made = copy_of(original(tmp_path / "whole"), "fp8-rows", tmp_path / "made")
    script = f"test -d {{model}} && test -f {{texts}} && cp -r {made}/. {{out}}"
    recipe = recipe_of(
        tmp_path, {"name": "mine-8bit", "folder": str(made)},
        {"name": "command", "command": f"sh -c '{script}'", "bits": 8, "label": "theirs"},
    )  # fmt: skip
    out = tmp_path / "out"
    assert qbench("run", recipe, "--plugin", plugin, "--out", out, "--device", "cpu") == 0
    records = {record.quantizer: record for record in Store(out).records()}
    assert {name: record.audit.passed for name, record in records.items()} == dict.fromkeys(
        ("fp32", "mine-8bit", "theirs"), True
    )
    record = records["theirs"]
    assert record.method == "command"
    assert 8 < record.audit.size.bits_per_weight < 8.5
    words = "its library wrote compressed-tensors, which is copied as it is; leave --weights out"
    with pytest.raises(UnavailableError, match=words):
        export_model(Store(out), record, tmp_path / "model", cache_folder(), "gptq")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("kind", ["q8_0", "q5_0", "q4_0"])
def test_gguf_layers_are_rounded_as_the_gguf_package_rounds_them(kind, tmp_path):
    pytest.importorskip("xllamacpp")
    gguf = gguf_file.library()
    whole = save_as_transformers(DEMO / "softmax", tmp_path / "whole")
    by_llamacpp.make(whole, tmp_path, None, settings_of(f"gguf-{kind}"))
    gguf_file.write_llama(whole, tmp_path / "whole.gguf", "f32", None)
    files = [gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors for name in ("model", "whole")]
    for made, unquantized in zip(*files, strict=True):
        values = gguf.dequantize(unquantized.data, unquantized.tensor_type)
        expected = values
        if made.name.startswith("blk.") and len(made.shape) == 2:
            assert made.tensor_type.name == kind.upper()
            expected = gguf.dequantize(gguf.quantize(values, made.tensor_type), made.tensor_type)
        assert (gguf.dequantize(made.data, made.tensor_type) == expected).all()


@pytest.mark.parametrize("code", [0, 3])
def test_a_mix_is_what_llama_quantize_writes(code, tmp_path, monkeypatch):
    pytest.importorskip("gguf", reason="pip install -e '.[llamacpp]'")
    program = tmp_path / by_llamacpp.PROGRAM
    program.write_text(f'#!/bin/sh\n/bin/cp "$1" "$2"; echo "$3" >"$0.types"; exit {code}\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    whole = save_as_transformers(DEMO / "softmax", tmp_path / "whole")
    (out := tmp_path / "out").mkdir()
    with pytest.raises(SystemExit, match="ended with exit code 3") if code else nullcontext():
        by_llamacpp.make(whole, out, None, settings_of("gguf-q4_k_m"))
        assert [file.name for file in out.iterdir()] == ["model.gguf"]
        assert gguf_file.describe(str(out / "model.gguf"))["sizes"]["num_hidden_layers"] == 4
    assert (tmp_path / "llama-quantize.types").read_text() == "Q4_K_M\n"


def test_the_key_of_a_mix_holds_the_program(tmp_path, monkeypatch):
    program = tmp_path / by_llamacpp.PROGRAM
    monkeypatch.setenv("PATH", str(tmp_path))
    programs = []
    for version in "12":
        program.write_text(f"#!/bin/sh\necho {version}\n")
        program.chmod(0o700)
        programs.append(versions(settings_of("gguf-q4_k_m").requirements)[program.name])
    assert programs[0] != programs[1]
    assert all(program.startswith("sha256:") for program in programs)


def tensors(file):
    return load_file(file).items()


def by_library(maker, whole, ids, normalizer, out):
    """Write what the library makes of ``whole`` on the texts ``ids``, called as its page says."""
    chosen = attention_name(normalizer, "auto", DEVICE)
    attention = {} if normalizer == "softmax" else {"attn_implementation": chosen}
    if maker.package == "auto_round":
        from auto_round import AutoRound, AutoScheme
        from auto_round.schemes import QuantizationScheme
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.bfloat16, **attention)
        tokenizer, element = AutoTokenizer.from_pretrained(whole), getattr(maker, "element", None)
        text = {"dataset": [row[None] for row in ids], "nsamples": len(ids), "seqlen": ids.shape[1]}
        sizes = {"scheme": element.upper()} if element else {"bits": maker.num_bits,
                                                             "group_size": 64}  # fmt: skip
        if maker.name == "autoscheme":  # which takes no token ids
            (file := out.with_suffix(".json")).write_text(json.dumps(tokenizer.batch_decode(ids)))
            text |= {"dataset": str(file), "seqlen": ids.shape[1] * 7 // 8}
            options = [QuantizationScheme(bits=bits, group_size=64) for bits in (2, 3, 4, 8)]
            scheme = {"avg_bits": maker.bits, "options": options, "nsamples": len(ids)}
            sizes = {"scheme": AutoScheme(**scheme, seqlen=text["seqlen"])}
        library = AutoRound(model, tokenizer, **sizes, **text, iters=maker.iters, device_map=DEVICE)
        library.quantize_and_save(str(out), format="auto_round")
        return
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from gptqmodel.quantization.config import FORMAT, METHOD, GPTAQConfig

    options = {
        "gptaq": {"gptaq": GPTAQConfig()},
        "awq": {"method": METHOD.AWQ, "format": FORMAT.GEMM},
        "paroquant": {"method": METHOD.PARO, "format": FORMAT.PAROQUANT,
                      "opt_rotation_epochs": 1, "opt_finetune_epochs": 1},
        "exl3": {"method": METHOD.EXL3, "format": FORMAT.EXL3, "group_size": -1},
    }.get(maker.method, {})  # fmt: skip
    config = QuantizeConfig(**{"bits": maker.num_bits, "group_size": 64} | options)
    model = GPTQModel.load(str(whole), config, **attention)
    rows = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in ids]
    backend = BACKEND.AWQ_TORCH if maker.method == "awq" else BACKEND.AUTO
    model.quantize(rows, batch_size=len(rows), backend=backend)
    model.save(str(out))


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAKERS = [
    *(pytest.param(name, normalizer, {"group_size": 64}, marks=pytest.mark.slow)
      for name in ("gptqmodel-4bit", "gptaq-3bit") for normalizer in ("softmax", "softpick")),
    pytest.param("awq-4bit", "softpick", {"group_size": 64}, marks=pytest.mark.slow),
    *(pytest.param("autoround-3bit", normalizer, {"group_size": 64, "iters": 3},
                   marks=pytest.mark.slow) for normalizer in ("softmax", "softpick")),
    *(pytest.param(name, "softmax", {"iters": 3}, marks=pytest.mark.slow)
      for name in ("autoround-nvfp4", "autoround-mxfp4")),
    pytest.param("autoscheme", "softmax", {"group_size": 64, "iters": 3}, marks=pytest.mark.slow),
    pytest.param("exl3-3bit", "softpick", {}, marks=pytest.mark.gpu),
    pytest.param("paroquant-4bit", "softmax", {"group_size": 64, "epochs": 1},
                 marks=pytest.mark.slow),
]  # fmt: skip


# GPTQModel takes a warning of transformers that is an error for a module that it cannot restore
@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
@pytest.mark.parametrize(("name", "normalizer", "options"), MAKERS)
def test_a_copy_is_what_the_library_makes_of_the_same_texts(name, normalizer, options, tmp_path):
    maker = settings_of(name, options)
    pytest.importorskip(maker.package)
    folder = DEMO / normalizer
    text = CalibrationText(
        path=DEMO / "calibration.jsonl", digest=None, samples=8, length=64, seed=0
    )
    calibration = read_calibration(text, load_tokenizer(find(str(folder))))
    cell = SimpleNamespace(checkpoint=SimpleNamespace(folder=folder, normalizer=normalizer))
    (made := tmp_path / "made").mkdir()
    made_copy._make(cell, maker, calibration, made, DEVICE, tmp_path / "made.log")
    whole, theirs = save_as_transformers(folder, tmp_path / "whole"), tmp_path / "theirs"
    # in a process of its own, as a user calls it: GPTQModel's loading depends on what ran before
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(by_library, maker, whole, calibration.ids, normalizer, theirs).result()
    ours, expected = (
        {key: tensor for file in place.rglob("*.safetensors") for key, tensor in tensors(file)}
        for place in (made, theirs)
    )
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[key], expected[key]) for key in ours)
    config = json.loads((made / "config.json").read_text())
    assert config.get("qbench_normalizer", "softmax") == normalizer


@pytest.mark.parametrize(
    ("channels", "group_size", "dtype"),
    [(192, 64, torch.bfloat16), (192, -1, torch.float32), (256, 128, torch.float32)],
)
def test_groups_are_rotated_together_as_the_library_does_one_by_one(channels, group_size, dtype):
    paroquant = pytest.importorskip("gptqmodel.quantization.paroquant.optimization")
    spec = importlib.util.find_spec("gptqmodel.utils.paroquant")
    library = importlib.util.module_from_spec(spec)  # its own: a loaded copy has replaced the loop
    spec.loader.exec_module(library)
    size = group_size if group_size > 0 else channels
    pairs, unused = paroquant.build_random_rotation_buffers(
        in_features=channels, group_size=size, krot=8, pair_ratio=0.5, seed=0, device="cpu"
    )
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(8, channels // 2, generator=generator).masked_fill(unused, 0).half()
    x = torch.randn(2, 5, channels, generator=generator).to(dtype)
    for scales in (None, torch.rand(1, channels, generator=generator).half() + 0.5):
        expected = library.apply_paroquant_rotation_reference(x, pairs, theta, scales, group_size)
        assert torch.equal(rotate_pairs(x, pairs, theta, scales, group_size), expected)
