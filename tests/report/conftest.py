"""A results folder with failed and missing cells, and its report."""

from __future__ import annotations

import pytest
from measured_damage import DAMAGE
from synthetic import make_store

from qbench import report

SIZES = {"arc_easy": 120, "lambada_openai": 100, "wikitext": 12}
QUANTIZERS = ("bf16", "gptq-2bit", "gptq-4bit", "hqq-2bit")


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    store = make_store(
        tmp_path_factory.mktemp("report") / "<b>&grid",
        sizes=SIZES,
        quantizers=QUANTIZERS,
        shift={"softmax/hqq-2bit": 1.0},
        failed=("softpick/gptq-2bit",),
        missing=("softmax/gptq-4bit",),
    )
    for cell in store.grid().cells:
        record = store.get(cell)
        if record is not None and record.status == "ok" and cell.bits:
            store.put(record.model_copy(update={"damage": DAMAGE}), store.outcomes(record), None)
    paths = report.write(store, figures=("svg", "png", "pdf"), published="softpick-340m")
    return store, paths


@pytest.fixture(scope="session")
def page(written):
    return written[1][0].read_text()
