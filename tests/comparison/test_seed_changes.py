"""``qbench compare A B`` over several trainings of one kind."""

import pytest
from synthetic import make_store

from qbench.comparison.changes import compare_results
from qbench.errors import ResultsError
from qbench.records import Trained
from qbench.tables.changes import changes_table

GROUPS = {"softmax": ("softmax.1", "softmax.2", "softmax.3")}


def made(folder, *, seed, trained=None, groups=GROUPS):
    return make_store(
        folder, checkpoints=GROUPS["softmax"], quantizers=("bf16",), sizes={"arc_easy": 80},
        replicates=groups, trained=trained,
        shift={f"{name}/bf16": 0.3 * seed for name in GROUPS["softmax"]},
    )  # fmt: skip


def test_the_mean_change_over_trainings_has_its_interval(tmp_path):
    changes = compare_results(made(tmp_path / "a", seed=0), made(tmp_path / "b", seed=1))
    assert [one.score.metric for one in changes.seeds] == ["acc", "acc_norm"]
    one = changes.seeds[0]
    each = [line.new - line.old for line in changes.lines if line.metric == "acc"]
    assert one.effect.each == pytest.approx(each)
    assert one.effect.estimate == pytest.approx(sum(each) / 3)
    assert one.effect.p_holm is not None
    text = changes_table(changes)
    assert "softmax/bf16" in text
    assert "3 × 80" in text


def trained(seed, **changed):
    common = {"seed": seed, "steps": 100} | changed
    return Trained(
        recipe="pair", normalizer="softmax", seed=seed, attention="softmax/triton", in_common=common
    )


def test_models_that_were_trained_otherwise_are_refused(tmp_path):
    a = made(tmp_path / "a", seed=0, trained={"softmax.2": trained(1)})
    b = made(tmp_path / "b", seed=0, trained={"softmax.2": trained(1, steps=7)})
    with pytest.raises(ResultsError, match=r"softmax\.2/bf16: trained diff.*steps 100 and 7"):
        compare_results(a, b)


def test_a_pair_that_was_trained_otherwise_is_refused_within_one_folder(tmp_path):
    model = {"model": {"hidden": 64, "init": 0.02}}
    how = {"softmax.1": trained(1, **model), "softmax.2": trained(1, **model)}
    other = trained(1, model={"hidden": 64, "init": 0.006})
    alike, unlike = (
        made(tmp_path / name, seed=0, groups=None, trained=how | more)
        for name, more in (("alike", {}), ("unlike", {"softmax.2": other}))
    )
    assert compare_results(alike, alike).lines
    with pytest.raises(
        ResultsError, match=r"softmax\.1 and softmax\.2 .*model\.init 0\.02 and 0\.006"
    ):
        compare_results(unlike, unlike)
