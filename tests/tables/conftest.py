"""A grid that tables are made of."""

import pytest
from synthetic import make_store

from qbench.comparison.compare import compare


@pytest.fixture(scope="session")
def tested(tmp_path_factory):
    """A grid in which softpick is clearly better at hqq-2bit, and the rest is close."""
    store = make_store(
        tmp_path_factory.mktemp("tested"),
        sizes={"arc_easy": 400, "lambada_openai": 300, "wikitext": 30},
        quantizers=("bf16", "hqq-2bit", "hqq-8bit"),
        shift={"softmax/hqq-2bit": 1.0},
        failed=("softpick/hqq-8bit",),
    )
    return compare(store)
