"""A good grid and its baseline, which the tests of the gate share."""

import pytest
from gate_results import QUANTIZERS, SIZES
from synthetic import make_store

from qbench.gate import baseline


@pytest.fixture(scope="session")
def good(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("good") / "grid", sizes=SIZES, quantizers=QUANTIZERS)


@pytest.fixture(scope="session")
def standard(good, tmp_path_factory):
    path = tmp_path_factory.mktemp("baseline") / "baseline.tar.xz"
    assert baseline.make(good, path) is None
    return path
