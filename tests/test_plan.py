"""What changes a cell's key, and what does not: one table."""

import json
import shutil
import subprocess
import sys
from importlib import metadata

import pytest
from small_recipe import DEMO, small_recipe

from qbench import machine
from qbench import plan as planning
from qbench.files import SCORING, digest_of
from qbench.plan import cell_names, plan, select
from qbench.recipe import Recipe

CALIBRATED = ["fp32", {"name": "gptq-4bit", "group_size": 64}]


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """Copies of what the bundled recipes read, which a test may edit."""
    folder = tmp_path_factory.mktemp("demo")
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    return folder


def keys(tmp_path, copies, **changes):
    content = {
        "checkpoints": {"softmax": str(copies / "softmax")},
        "quantizers": CALIBRATED,
        "tasks": ["demo_choice"],
        "definitions": str(copies / "tasks"),
        "data": str(copies / "data"),
        "calibration": {"path": str(copies / "calibration.jsonl"), "samples": 2, "length": 64},
        **changes,
    }
    cells = plan(Recipe.load(small_recipe(tmp_path, **content)), device="cpu").cells
    return {cell.label: cell.key for cell in cells}


def appended(file, text="\n"):
    return lambda copies: (copies / file).write_text((copies / file).read_text() + text)


def put(file, content):
    return lambda copies: (copies / file).write_text(json.dumps(content))


BOTH, QUANTIZED, NONE = {"fp32", "gptq-4bit"}, {"gptq-4bit"}, set()


@pytest.mark.parametrize(
    ("edit", "changed"),
    [
        (appended("data/demo_choice/test.jsonl"), BOTH),
        (appended("tasks/demo_choice.yaml", "\ndescription: x\n"), BOTH),
        (appended("softmax/config.json", " "), BOTH),
        (put("softmax/generation_config.json", {"do_sample": False}), BOTH),
        (appended("calibration.jsonl"), QUANTIZED),
        (appended("data/demo_pages/test.jsonl"), NONE),
        (appended("tasks/demo_choice.yaml", "\n# a comment\n"), NONE),
        (put("softmax/notes.json", {}), NONE),
    ],
    ids=["data", "definition", "config", "generation config", "calibration text",
         "another task's data", "a comment in a definition", "a file that is not read"],
)  # fmt: skip
def test_an_edited_file_changes_the_keys_of_what_reads_it(tmp_path, copies, edit, changed):
    before = keys(tmp_path, copies)
    edit(copies)
    after = keys(tmp_path, copies)
    assert {label for label in before if before[label] != after[label]} == changed


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({"evaluation": {"limit": 4}}, BOTH),
        ({"evaluation": {"limit": 3, "batch_size": 3}}, BOTH),
        ({"evaluation": {"limit": 3, "fewshot_seed": 7}}, BOTH),
        ({"evaluation": {"limit": 3, "scoring": "fast"}}, BOTH),
        ({"evaluation": {"limit": 3, "seed": 7}}, BOTH),
        ({"evaluation": {"limit": 3, "max_length": 64}}, BOTH),
        ({"evaluation": {"limit": 3, "softmax_dtype": "model"}}, BOTH),
        ({"tasks": [{"name": "demo_choice", "num_fewshot": 1}]}, BOTH),
        ({"evaluation": {"limit": 3, "scoring": "exact"}}, NONE),
        ({"evaluation": {"limit": 3, "tolerance": {"mean": 0.001}}}, NONE),
        ({"name": "another"}, NONE),
        ({"quantizers": ["fp32", {"name": "gptq-4bit", "group_size": 32}]}, QUANTIZED),
        ({"quantizers": ["fp32", {"name": "gptq-4bit", "group_size": 64, "damp": 0.05}]}, NONE),
    ],
)
def test_a_setting_changes_keys_when_it_can_change_a_score(tmp_path, copies, changes, changed):
    """Not when it only states what was the default: nothing "auto" is in a key."""
    before = keys(tmp_path, copies, evaluation={"limit": 3})
    after = keys(tmp_path, copies, **{"evaluation": {"limit": 3}, **changes})
    assert {label for label in before if before[label] != after[label]} == changed


def test_another_version_of_our_own_code_changes_every_key(tmp_path, copies, monkeypatch):
    before = keys(tmp_path, copies)
    package = tmp_path / "qbench"
    source = planning.__file__.removesuffix("plan.py")
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(
        planning, "code_digest", lambda: digest_of([package / name for name in SCORING])
    )
    assert keys(tmp_path, copies) == before
    appended("quantizers/calibration.py", "\nx = 1\n")(package)
    assert not set(keys(tmp_path, copies).values()) & set(before.values())


def test_another_version_of_a_library_changes_every_key(tmp_path, copies, monkeypatch):
    before = keys(tmp_path, copies)
    real = metadata.version
    monkeypatch.setattr(machine, "version", lambda n: "0" if n == "lm-eval" else real(n))
    assert not set(keys(tmp_path, copies).values()) & set(before.values())


def test_keys_are_the_same_in_another_process_and_folder(tmp_path, copies):
    here = keys(tmp_path, copies)
    moved = tmp_path / "moved"
    shutil.copytree(copies, moved)
    code = (
        "import sys; from pathlib import Path; import test_plan as t; "
        f"print(t.keys(Path({str(tmp_path)!r}), Path({str(moved)!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=moved, env={"PYTHONPATH": ":".join(sys.path)})  # fmt: skip
    assert done.stdout.strip() == str(here)


def test_a_gpu_of_another_kind_is_another_key(tmp_path, copies, monkeypatch):
    """The driver is asked; here there is none, so that its answer is put in."""
    monkeypatch.setattr(sys.modules["qbench.checkpoints.find"], "choose", lambda *_: "reference")
    found = []
    for name in ("NVIDIA H200", "NVIDIA L4", "NVIDIA L4"):
        monkeypatch.setattr(planning, "hardware", lambda _, name=name: name)
        recipe = Recipe.load(small_recipe(tmp_path, quantizers=["fp32"], tasks=["demo_choice"]))
        planned = plan(recipe, device="cuda")
        assert planned.hardware == name
        assert "triton" in planned.cells[0].key_parts["versions"]
        found.append(planned.cells[0].key)
    assert found[0] != found[1] == found[2]


def test_cells_are_named_before_anything_is_planned(tmp_path):
    recipe = Recipe.load(small_recipe(tmp_path))
    assert sorted(cell_names(recipe)) == sorted(c.name for c in plan(recipe, device="cpu").cells)
    assert select(cell_names(recipe), "softpick/*") == ["softpick/fp32", "softpick/rtn-4bit"]
    assert select(cell_names(recipe), "*/fp32,softpick/*") == [
        "softmax/fp32", "softpick/fp32", "softpick/rtn-4bit",
    ]  # fmt: skip


def bases(tmp_path, *quantizers):
    path = small_recipe(tmp_path, quantizers=list(quantizers))
    cells = plan(Recipe.load(path), device="cpu").cells
    found = {cell.label: cell for cell in cells if cell.checkpoint_name == "softpick"}
    return found, {label: cell.base and cell.base.quantizer for label, cell in found.items()}


def test_a_quantized_cell_is_measured_against_the_unquantized_one_of_its_dtype(tmp_path):
    others = [("rtn-4bit", "bfloat16"), ("rtn-8bit", "float32"), ("rtn-2bit", "float16")]
    quantizers = [{"name": name, "compute_dtype": dtype} for name, dtype in others]
    cells, found = bases(tmp_path, "fp32", "bf16", *quantizers)
    assert found == {"fp32": None, "bf16": None, "rtn-4bit": "bf16", "rtn-8bit": "fp32",
                     "rtn-2bit": "fp32"}  # fmt: skip
    assert cells["rtn-2bit"].notes == ("damage is against fp32: none is unquantized in float16",)
    assert cells["rtn-4bit"].notes == ()


def test_an_unquantized_cell_has_the_same_key_whatever_stands_before_it(tmp_path):
    both, _ = bases(tmp_path, "bf16", "fp32", "rtn-4bit")
    alone, _ = bases(tmp_path, "fp32", "rtn-4bit")
    assert both["fp32"].key == alone["fp32"].key
