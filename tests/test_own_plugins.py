"""Files and packages of users: the example of docs/plugins.md, as its commands have it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_recipe import qbench, small_recipe

from qbench.errors import RecipeError
from qbench.files import digest
from qbench.recipe import Recipe
from qbench.store import Store

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "plugins.md").read_text()
CODE = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def example(tmp_path):
    path = tmp_path / "clipped.py"
    path.write_text(CODE)
    return path


def run_in_a_process(*arguments: object) -> subprocess.CompletedProcess:
    """A process of its own: what a file registers stays registered."""
    command = [sys.executable, "-m", "qbench", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)


NAMED = "from qbench.quantizers import METHODS, register\nregister("
OF = "(METHODS.get('bnb-8bit').settings)"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("import nothing_of_this_name\n", r"line 1: ModuleNotFoundError: No module named"),
        ("x = 1\ny = 1 / 0\n", r"line 2: ZeroDivisionError: division by zero"),
        ("def\n", r"line 1: SyntaxError"),
        ("raise BaseException('no')\n", "line 1: BaseException: no"),
        ("import sys\nsys.exit(3)\n", "line 2: SystemExit: 3"),
        (f"{NAMED}'../x', 'a line'){OF}\n", r"'\.\./x': a name is letters"),
        (f"{NAMED}'a\\nb', 'a line'){OF}\n", "a name is letters"),
        (f"{NAMED}5, 'a line'){OF}\n", "quantizer 5: a name is letters"),
        (f"{NAMED}None, 'a line'){OF}\n", "quantizer None: a name is letters"),
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
        ({"path": "a.py"}, r"recipe\.yaml:1: plugins\.path was removed: write the path alone"),
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


def toy_recipe(folder):
    """A checkpoint that the toy normalizer attends, unquantized and rounded to nearest."""
    source, toy = ROOT / "recipes" / "demo" / "softpick", folder / "toy"
    shutil.copytree(source, toy)
    config = json.loads((toy / "config.json").read_text())
    config.pop("attn_impl", None)
    (toy / "config.json").write_text(json.dumps(config | {"qbench_normalizer": "toy"}))
    return small_recipe(folder, checkpoints={"toy": str(toy)}, tasks=["demo_lastword"])


@pytest.mark.slow
def test_all_three_kinds_come_from_files(tmp_path):
    """In worker processes of a file's own executor, and the records state the files' digests."""
    toy = ROOT / "tests" / "plugins" / "toy_normalizer.py"
    (tmp_path / "clipped.py").write_text(CODE)
    (tmp_path / "mine.py").write_text(
        "import multiprocessing\nfrom concurrent.futures import ProcessPoolExecutor\n"
        "from qbench.runner.workers import register\n"
        "context = multiprocessing.get_context('spawn')\n"
        "register('mine', lambda device: ProcessPoolExecutor(1, mp_context=context))\n"
    )
    files = [tmp_path / "clipped.py", tmp_path / "mine.py", toy]
    done = run_in_a_process(
        "run", toy_recipe(tmp_path), "--quantizers", "fp32,clipped-4bit", "--executor", "mine",
        "--out", tmp_path / "out", *[word for file in files for word in ("--plugin", file)],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "executor mine" in done.stderr
    records = {record.quantizer: record for record in Store(tmp_path / "out").records()}
    assert records.keys() == {"fp32", "clipped-4bit"}
    for record in records.values():
        assert record.attention == "toy/reference"
        assert record.environment.plugins.keys() == {file.name for file in files}
    clipped = records["clipped-4bit"]
    assert clipped.audit.passed
    assert clipped.key_parts["quantizer"]["source"] == digest(CODE.encode())
