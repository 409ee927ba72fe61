"""What reads results starts at once and never loads torch."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from small_recipe import qbench, small_recipe
from synthetic import make_store

from qbench.records import RESPONSE_COLUMNS

ROOT = Path(__file__).parent.parent

HEAVY = ("torch", "transformers", "lm_eval", "datasets")


def python(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout


def test_reading_results_tables_with_all_statistics_and_the_gate_load_no_torch(tmp_path):
    store = make_store(tmp_path, sizes={"arc_easy": 30, "wikitext": 5}, quantizers=("bf16",))
    loaded = python(
        "import sys, qbench.api, qbench.cli.app, qbench.viewer.figures\n"
        "from qbench.gate import baseline, check\n"
        "from qbench.store import Store\n"
        "from qbench.comparison.compare import compare\n"
        "from qbench.tables import table_files\n"
        f"store = Store({str(store.directory)!r}); out = store.directory / 'baseline.tar.xz'\n"
        "table_files(compare(store))\n"
        "baseline.make(store, out); check.check(store, out); print(*sys.modules)"
    ).split()
    assert not set(HEAVY) & set(loaded)


def test_what_tables_load_is_imported_while_a_run_works(tmp_path):
    store = make_store(tmp_path, sizes={"arc_easy": 30})
    for record in store.records():
        answers = [("arc_easy", n, 0, -1.5, True, None, None, 0) for n in range(30)]
        responses = pd.DataFrame(answers, columns=[*RESPONSE_COLUMNS])
        store.put(record, store.outcomes(record), responses)
    loaded = python(
        "import sys\n"
        "from qbench.cli.run import import_for_tables\n"
        "from qbench.store import Store\n"
        "import_for_tables(); before = {*sys.modules}\n"
        "from qbench.comparison.compare import compare\n"
        "from qbench.tables import table_files\n"
        f"table_files(compare(Store({str(store.directory)!r}))); print(*{{*sys.modules}} - before)"
    ).split()
    assert not {"pandas", "pyarrow", "pyarrow.parquet", "scipy"} & set(loaded)


def test_workers_import_torchs_compiler_when_it_is_used_only(tmp_path):
    """Python code of torch asks it, too, as a model is made, what it need not look into, and
    TorchVision imports it."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("import torch._dynamo.utils")
    before, used = python(
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "import qbench.runner.preload, torch\n"
        "with torch.device('meta'): 2.0 ** torch.arange(0.0, 4.0, 2.0)\n"
        "print(*sys.modules)\n"
        "from transformers import masking_utils\n"
        "with masking_utils.TransformGetItemToIndex():\n"
        "    print(torch.compile(lambda x: 2 * x, backend='eager')(torch.ones(1)).item())"
    ).splitlines()
    names = before.split()
    assert "transformers.modeling_utils" in names
    assert not [name for name in names if name.startswith(("torch._dynamo.", "torch._inductor"))]
    assert not {"hqq", "torchao", "torch.distributed.tensor", "triton"} & set(names)
    assert used == "2.0"


def test_loading_a_model_imports_no_sympy():
    """A second, for the sizes of a rotary embedding's tensors on the meta device."""
    said = python(
        "import sys, qbench.runner.preload, torch\n"
        "from qbench.recipe import Recipe\nfrom qbench.plan import plan\n"
        "from qbench.cell import load\n"
        "demo = plan(Recipe.load('recipes/demo.yaml'), device='cpu')\n"
        "model = load(demo.cells[0], demo)\n"
        "with torch.device('meta'): print('sympy' in sys.modules, torch.arange(2).device)\n"
        "print(model.model.rotary_emb.inv_freq[:2].tolist())"
    )
    assert said == "False meta\n[1.0, 0.5623413324356079]\n"


def test_workers_import_lm_eval_beside_weights_their_fork_server_before():
    code = "import multiprocessing, sys, qbench.runner.preload; print(*sys.modules)"
    assert "qbench.cell_tasks" in python(code).split()
    child = "multiprocessing.process._parent_process = 1"
    names = python(code.replace("sys,", f"sys\n{child}\nimport")).split()
    assert "qbench.cell" in names
    assert not {"lm_eval", "datasets", "pandas"} & set(names)


def test_a_worker_imports_its_libraries_while_a_thread_imports_pytorch():
    """The one waits for the other: two that import parts of PyTorch at a time end the process."""
    said = python(
        "import threading\n"
        "from qbench.machine import import_transformers\n"
        "thread = threading.Thread(target=__import__, args=('torch',)); thread.start()\n"
        "import_transformers(); thread.join(); print('done')"
    )
    assert said == "done\n"


def test_transformers_reads_each_model_file_once_and_finds_all_it_finds_by_itself():
    plain, ours = (
        python(
            f"import {module}\n"
            "import transformers.models\n"
            "from transformers.utils import import_utils as utils\n"
            "found = utils.define_import_structure(transformers.models.__file__)\n"
            "print(sorted((sorted(k), sorted((m, sorted(o)) for m, o in v.items()))\n"
            "             for k, v in found.items()))\n"
            "print(utils.create_import_structure_from_path.cache_info())"
        ).splitlines()
        for module in ("torch", "qbench.runner.preload")
    )
    assert ours[0] == plain[0]
    if "maxsize=128" in plain[1]:  # else transformers has changed, and reads as it does
        assert "maxsize=None" in ours[1]


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("command", "module"), [("run", "qbench.cell"), ("analyze", "qbench.analysis.analyze_cell")]
)
def test_a_library_that_cannot_be_imported_fails_its_cell(
    tmp_path, command, module, monkeypatch, capfd
):
    """In one line, exit code 1; the traceback is in the cell's log."""
    monkeypatch.setitem(sys.modules, module, None)
    options = ("--only", "softpick/fp32", "--device", "cpu", "--out", tmp_path / "out")
    assert qbench(command, small_recipe(tmp_path), *options) == 1
    said = capfd.readouterr()
    assert f"ModuleNotFoundError: import of {module} halted" in said.err
    assert "Traceback" not in said.out + said.err
    assert any("Traceback" in log.read_text() for log in (tmp_path / "out").rglob("*.log"))
