"""The recipe for Slurm in docs/clusters.md, with an sbatch that runs the job's script here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_recipe import small_recipe

pytest.importorskip("dask_jobqueue")

ROOT = Path(__file__).parents[2]
SBATCH = """#!/bin/sh
for last; do :; done
cp "$last" {folder}/job.sh  # which the caller removes
setsid sh {folder}/job.sh >{folder}/job.log 2>&1 &
echo $! >>{folder}/jobs
echo "Submitted batch job $!"
"""


@pytest.mark.slow
def test_the_recipe_for_slurm_runs_cells(tmp_path):
    pages = (ROOT / "docs" / "clusters.md").read_text()
    recipe = re.search(r"```python\n(from dask_jobqueue.*?)```", pages, re.DOTALL)[1]
    assert "jobs=8" in recipe
    recipe = recipe.replace("jobs=8", "jobs=1").replace('memory="64 GB"', 'memory="4 GB"')
    for name, text in {"sbatch": SBATCH.format(folder=tmp_path), "scancel": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "QBENCH_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
        "DASK_DISTRIBUTED__SCHEDULER__DASHBOARD__STATUS__TASK_STREAM_LENGTH": "1",
    }
    cluster = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", recipe], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    try:
        address = cluster.stdout.readline().strip()
        path = small_recipe(tmp_path, tasks=["demo_lastword"])
        done = subprocess.run(
            [sys.executable, "-m", "qbench", "run", path, "--cluster", address, "--only",
             "softmax/fp32", "--out", tmp_path / "out"],
            env=environment, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + (tmp_path / "job.log").read_text()
        assert "1 worker on 1 host" in done.stderr
        assert "softmax/fp32: done" in done.stderr
    finally:
        cluster.communicate("\n", timeout=30)
        for job in (tmp_path / "jobs").read_text().split():
            subprocess.run(["kill", "--", f"-{job}"], stderr=subprocess.DEVNULL)
