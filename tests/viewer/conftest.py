"""A results folder and a server of it."""

import pytest
from hostile_results import Running, fill


@pytest.fixture(scope="module", autouse=True)
def few_rounds():
    """Of 10,000 rounds of each bootstrap: pages look the same. Other folders' tests keep 10,000."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qbench.statistics.intervals.ROUNDS", 500)
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("viewer") / "<b>&grid"
    fill(path, failed=("softpick/hqq-2bit",), missing=("softmax/gptq-4bit",))
    return path


@pytest.fixture
def serve():
    """``serve(*folders)``: a server that ends with the test."""
    made = []

    def start(*folders, **options):
        made.append(Running(*folders, **options))
        return made[-1]

    yield start
    for one in made:
        one.close()
