"""A quantizer and a normalizer, each in one file, through a run; files that cannot be loaded."""

import importlib
import json
from pathlib import Path

import pytest
from loading import save_as_transformers
from small_recipe import DEMO, blocks, qbench, run_small

from qbench.attention.normalizers import NORMALIZERS
from qbench.errors import RecipeError
from qbench.files import verify_tensors
from qbench.plugins import source_digest
from qbench.recipe import Recipe
from qbench.store import Store


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Softmax beside the toy normalizer, unquantized and at one bit, to tables."""
    for name in ("toy_normalizer", "toy_quantizer"):
        importlib.import_module(f"plugins.{name}")
    folder = tmp_path_factory.mktemp("plugins")
    toy = folder / "toy"
    save_as_transformers(Path(blocks("softpick")["softpick"]), toy)
    config = json.loads((toy / "config.json").read_text())
    (toy / "config.json").write_text(json.dumps(config | {"qbench_normalizer": "toy"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QBENCH_CACHE", str(folder / "cache"))
        return run_small(
            folder, checkpoints={**blocks("softmax"), "toy": str(toy)},
            quantizers=["fp32", {"name": "sign-1bit", "gain": 0.9, "label": "signs"},
                        {"name": "gptq-4bit", "group_size": 64}],
            calibration={"path": str(DEMO / "calibration.jsonl"), "samples": 2, "length": 32},
            tasks=["demo_choice"],
        ).directory  # fmt: skip


def test_the_cells_ran_on_the_plug_ins_and_passed_their_audit(results):
    records = {record.cell: record for record in Store(results).records()}
    cell = records["toy/signs"]
    assert cell.attention == "toy/reference"
    assert (cell.method, cell.title, cell.precision.name) == ("sign", "Signs", "W1A16")
    assert cell.audit.passed
    assert cell.audit.coverage == 1.0
    assert 1 <= cell.audit.bits_per_weight < 2
    assert cell.damage.tasks["demo_choice"].distributions.kl.mean > 0
    assert cell.key_parts["quantizer"]["gain"] == 0.9
    digest = source_digest(NORMALIZERS["toy"].__class__)
    assert cell.key_parts["normalizer source"] == digest
    assert "normalizer source" not in records["softmax/signs"].key_parts


def test_weights_calibrated_under_a_plug_in_have_its_source_in_their_key(results):
    """An edited normalizer gave 178.81 with the weights that were calibrated under the old one,
    where 175.04 is right."""
    sources = {}
    for path in (results.parent / "cache" / "artifacts").glob("*/*.safetensors"):
        parts = verify_tensors(path)["parts"]
        found = parts["calibration"] or {}
        sources[path.name.rpartition("-")[0], found.get("attention")] = found
    digest = source_digest(NORMALIZERS["toy"].__class__)
    assert sources["gptq-4bit", "qbench-toy-reference"]["normalizer source"] == digest
    assert "normalizer source" not in sources["gptq-4bit", "qbench-softmax-reference"]
    assert sources["sign-1bit", None] == {}


def test_tables_show_them(results):
    tables = (results / "tables.md").read_text()
    assert "Signs: Δ = toy − softmax" in tables
    assert "| signs" in tables


pytestmark = pytest.mark.usefixtures("own_cache")


NAMED = "from qbench.quantizers import METHODS, register\nregister("
SETTINGS = "from qbench.quantizers import WeightSettings, register, settings\n@settings\n"
OF = "(METHODS['bnb-8bit'].settings)"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("import nothing_of_this_name\n", r"line 1: ModuleNotFoundError: No module named"),
        ("x = 1\ny = 1 / 0\n", r"line 2: ZeroDivisionError: division by zero"),
        ("def\n", r"line 1: SyntaxError"),
        ("raise BaseException('no')\n", "line 1: BaseException: no"),
        ("import sys\nsys.exit(3)\n", "line 2: SystemExit: 3"),
        (f"{NAMED}'../x', 'a line'){OF}\n", "have up to 64 letters[^;]*; correct the f"),
        (f"{NAMED}'a\\nb', 'a line'){OF}\n", "must have up to 64 letters"),
        (f"{NAMED}'a', 'a line', bits=4){OF}\n", r"TypeError: \w+ has no option bits, which"),
        (
            f"{SETTINGS}class A(WeightSettings):\n    source: str\nregister('a', 'a line')(A)\n",
            "TypeError: A: an option cannot be called source; rename it",
        ),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_does_not_load_is_one_line(tmp_path, content, said):
    path = tmp_path / "broken.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RecipeError, match=said):
        qbench("list", "quantizers", "--plugin", path)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("nosuch.py", r"recipe\.yaml:1: plugins\[0\] '\S+nosuch\.py': cannot be read"),
        ({"path": "a.py"}, r"recipe\.yaml:1: plugins\[0\]: Input should be a valid string"),
    ],
)
def test_plugins_of_a_recipe_that_cannot_be_are_one_line(tmp_path, entry, said):
    (tmp_path / "a.py").write_text("x = 1\n")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"plugins: [{json.dumps(entry)}]\nname: x\ncheckpoints: {{a: b/c}}\nquantizers: [bf16]\n"
        "tasks: [sciq]\n"
    )
    with pytest.raises(RecipeError, match=said) as error:
        Recipe.load(path)
    assert len(str(error.value).splitlines()) == 1
