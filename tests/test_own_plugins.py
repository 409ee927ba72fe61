"""Files and packages of users: the example of docs/plugins.md, as its commands have it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_recipe import qbench, small_recipe

from qbench import plugins
from qbench.errors import RecipeError
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


def test_the_example_is_as_short_as_promised():
    assert len([line for line in CODE.splitlines() if line.strip()]) <= 30


def test_the_example_runs_in_worker_processes_and_beats_round_to_nearest(tmp_path, example):
    path = small_recipe(tmp_path, checkpoints={"softmax": str(ROOT / "recipes/demo/softmax")},
                        tasks=["demo_lastword"], quantizers=["fp32", "rtn-4bit"])  # fmt: skip
    done = run_in_a_process(
        "run", path, "--plugin", example, "--quantizers", "fp32,rtn-4bit,clipped-4bit",
        "--out", tmp_path / "out", "--workers", "2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = {record.quantizer: record for record in Store(tmp_path / "out").records()}
    clipped = records["clipped-4bit"]
    assert clipped.audit.passed
    assert clipped.audit.weight_error < records["rtn-4bit"].audit.weight_error
    digest = plugins.digest(example.read_bytes())
    assert clipped.environment.plugins == {"clipped.py": digest}
    assert clipped.key_parts["quantizer"]["source"] == digest
    assert clipped.key_parts["quantizer"]["steps"] == 20
    assert qbench("tables", tmp_path / "out") == 0  # which knows nothing of the file


def test_the_example_runs_on_a_cluster(tmp_path, example):
    pytest.importorskip("distributed")
    path = small_recipe(tmp_path, checkpoints={"softmax": str(ROOT / "recipes/demo/softmax")},
                        tasks=["demo_lastword"])  # fmt: skip
    done = run_in_a_process(
        "run", path, "--plugin", example, "--quantizers", "clipped-4bit", "--cluster", "local:1",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (record,) = Store(tmp_path / "out").records()
    assert record.environment.plugins == {"clipped.py": plugins.digest(example.read_bytes())}


def test_list_shows_it_with_its_settings(example):
    done = run_in_a_process("list", "quantizers", "--plugin", example)
    assert done.returncode == 0, done.stderr
    assert "clipped-4bit" in done.stdout
    assert "shrunk ranges to try" in done.stdout


def test_an_executor_of_a_file_runs_the_cells(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from qbench.running.executors import register\n"
        "register('mine', lambda device: ThreadPoolExecutor(1))\n"
    )
    recipe = small_recipe(tmp_path, tasks=["demo_lastword"])
    arguments = ("run", recipe, "--plugin", path, "--out", tmp_path / "out", "--only", "*/fp32")
    done = run_in_a_process(*arguments, "--executor", "mine")
    assert done.returncode == 0, done.stderr
    assert "executor mine" in done.stderr
    assert run_in_a_process(*arguments, "--executor", "other").returncode == 2
    done = run_in_a_process(*arguments, "--executor", "mine", "--workers", "2")
    assert done.returncode == 2
    assert "leave --workers out" in done.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("import nothing_of_this_name\n", r"line 1: ModuleNotFoundError: No module named"),
        ("x = 1\ny = 1 / 0\n", r"line 2: ZeroDivisionError: division by zero"),
        ("def\n", r"line 1: SyntaxError"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_does_not_load_is_one_line(tmp_path, content, said):
    path = tmp_path / "broken.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RecipeError, match=said):
        qbench("list", "quantizers", "--plugin", path)


def test_a_package_registers_by_its_entry_points(tmp_path):
    site = tmp_path / "site"
    information = site / "mine-1.2.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.2\n")
    (information / "entry_points.txt").write_text("[qbench.quantizers]\nclipped = clipped\n")
    (site / "clipped.py").write_text(CODE)
    command = f"import sys; sys.path.insert(0, {str(site)!r}); from qbench.__main__ import main; " \
        "sys.argv[1:] = ['list', 'quantizers']; main()"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "clipped-4bit" in done.stdout
    (site / "clipped.py").write_text("1 / 0\n")
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "the package behind clipped (qbench.quantizers) does not load" in done.stderr
