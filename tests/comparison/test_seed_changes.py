"""``qbench compare A B`` of models that were trained differently."""

from synthetic import make_store

from qbench.comparison.changes import compare_results
from qbench.records import Trained

CHECKPOINTS = ("softmax.1", "softmax.2")


def made(folder, trained=None):
    return make_store(
        folder, checkpoints=CHECKPOINTS, quantizers=("bf16",), sizes={"arc_easy": 20},
        trained=trained,
    )  # fmt: skip


def trained(seed, **changed):
    common = {"seed": seed, "steps": 100} | changed
    return Trained(
        recipe="pair", normalizer="softmax", seed=seed, attention="softmax/triton", in_common=common
    )


def test_models_that_were_trained_otherwise_have_a_note(tmp_path):
    a = made(tmp_path / "a", {"softmax.2": trained(1)})
    b = made(tmp_path / "b", {"softmax.2": trained(1, steps=7)})
    changes = compare_results(a, b)
    assert changes.lines
    assert changes.problems == ("softmax.2/bf16: trained differently: steps 100 and 7",)
