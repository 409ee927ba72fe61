"""The demo's modules lie beside its recipe, outside the package."""

import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "recipes" / "demo"
sys.path.insert(0, str(DEMO))


@pytest.fixture(scope="session")
def demo() -> Path:
    """The folder of the bundled demo."""
    return DEMO


@pytest.fixture(scope="session")
def made():
    """World, evaluation rows and calibration rows of the bundled seed, made afresh."""
    from corpus import make_data

    return make_data(0)
