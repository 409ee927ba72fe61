"""What reads results starts at once and never loads torch."""

import subprocess
import sys

import pandas as pd
import pytest
from small_recipe import qbench, small_recipe
from synthetic import make_store

from qbench.records import RESPONSE_COLUMNS


def python(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout


def test_reading_results_tables_with_all_statistics_and_the_gate_load_no_torch(tmp_path):
    """And what tables load is imported while a run works."""
    store = make_store(tmp_path, sizes={"arc_easy": 30, "wikitext": 5})
    for record in store.records():
        answers = [("arc_easy", n, 0, -1.5, True, None, None, 0) for n in range(30)]
        responses = pd.DataFrame(answers, columns=[*RESPONSE_COLUMNS])
        store.put(record, store.outcomes(record), responses)
    late, loaded = python(
        "import sys\n"
        "from qbench.cli.run import import_for_tables\n"
        "from qbench.store import Store\n"
        "import_for_tables(); before = {*sys.modules}\n"
        "from qbench.comparison.compare import compare\n"
        "from qbench.tables import table_files\n"
        f"store = Store({str(store.directory)!r}); out = store.directory / 'baseline.tar.xz'\n"
        "table_files(compare(store)); print(*{*sys.modules} - before)\n"
        "import qbench.api, qbench.cli.app, qbench.viewer.figures\n"
        "from qbench.gate import baseline, check\n"
        "baseline.make(store, out); check.check(store, out); print(*sys.modules)"
    ).splitlines()
    assert not {"torch", "transformers", "lm_eval", "datasets"} & {*loaded.split()}
    assert not {"pandas", "pyarrow", "pyarrow.parquet", "scipy"} & {*late.split()}


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory):
    """What a process says that has imported all that cells need: its modules, what it loads without
    SymPy, what torch's compiler gives, and a class of transformers."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").write_text("import torch._dynamo.utils")
    return python(
        f"import sys; sys.path.append({str(folder)!r})\n"
        "import qbench.runner.preload, torch, transformers\n"
        "print(*sys.modules); before = {*sys.modules}\n"
        "from qbench.recipe import Recipe\nfrom qbench.plan import plan\n"
        "from qbench.cell import load\n"
        "demo = plan(Recipe.load('recipes/demo.yaml'), device='cpu')\n"
        "model = load(demo.cells[0], demo)\n"
        "late = {*sys.modules} - before\n"
        "with torch.device('meta'): print('sympy' in late, torch.arange(2).device)\n"
        "print(model.model.rotary_emb.inv_freq[:2].tolist())\n"
        "with torch.device('meta'): 2.0 ** torch.arange(0.0, 4.0, 2.0)\n"
        "compiler = ('torch._dynamo.', 'torch._inductor')\n"
        "print([name for name in sys.modules if name.startswith(compiler)])\n"
        "from torch._dynamo.utils import counters\n"
        "from torch._dynamo.output_graph import counters as counted; print(counters is counted)\n"
        "from transformers import masking_utils\n"
        "with masking_utils.TransformGetItemToIndex():\n"
        "    print(torch.compile(lambda x: 2 * x, backend='eager')(torch.ones(1)).item())\n"
        "print(transformers.Qwen3_5ForCausalLM.__name__)"
    ).splitlines()


def test_workers_import_torchs_compiler_when_it_is_used_only(fork_server):
    """Python code of torch asks it, too, as a model is made, what it need not look into, and
    TorchVision imports it. A part of it is imported once."""
    names = fork_server[0].split()
    assert "transformers.modeling_utils" in names
    assert not {"hqq", "torchao", "torch.distributed.tensor", "triton"} & set(names)
    assert fork_server[3:6] == ["[]", "True", "2.0"]


def test_loading_a_model_imports_no_sympy(fork_server):
    """A second, for the sizes of a rotary embedding's tensors on the meta device. PyTorch 2.14
    imports it with its flex attention."""
    assert fork_server[1:3] == ["False meta", "[1.0, 0.5623413324356079]"]


def test_a_class_that_reads_videos_too_is_found_beside_torchvision(fork_server):
    """transformers asks what it holds for missing, as it did while TorchVision was hidden."""
    assert fork_server[6:7] == ["Qwen3_5ForCausalLM"]


def test_workers_import_lm_eval_beside_weights_their_fork_server_before(fork_server):
    """Beside a thread that imports PyTorch, too: one waits for the other, since two that import
    parts of it at a time end the process."""
    assert "qbench.cell_tasks" in fork_server[0].split()
    loaded = python(
        "import multiprocessing, sys, threading\n"
        "multiprocessing.process._parent_process = 1\n"
        "thread = threading.Thread(target=__import__, args=('torch',)); thread.start()\n"
        "import qbench.runner.preload; thread.join(); print(*sys.modules)"
    ).split()
    assert "qbench.cell" in loaded
    assert not {"lm_eval", "datasets", "pandas"} & {*loaded}


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
