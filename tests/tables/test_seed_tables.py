"""Tables over several trainings of each kind."""

import csv
import io
from dataclasses import replace

import pytest
from synthetic import make_store

from qbench.comparison.compare import compare
from qbench.comparison.rows import training_notes
from qbench.records import Trained
from qbench.tables import render, table_files

pytestmark = pytest.mark.usefixtures("few_rounds")
SIZES = {"arc_easy": 120, "wikitext": 30}
GROUPS = {
    name: tuple(f"{name}.{number}" for number in (1, 2, 3)) for name in ("softmax", "softpick")
}
MEMBERS = tuple(member for members in GROUPS.values() for member in members)


def trained(checkpoint, **changed):
    name, _, number = checkpoint.partition(".")
    common = {"seed": int(number), "data": "a" * 8, "steps": 6103, "settings.tokens": 400_000_000}
    return Trained(
        recipe="pair", normalizer=name, seed=int(number), attention=f"{name}/triton",
        in_common=common | changed,
    )  # fmt: skip


def made(folder, **settings):
    common = {"checkpoints": MEMBERS, "sizes": SIZES, "replicates": GROUPS}
    return make_store(folder, quantizers=("bf16", "gptq-2bit"), **common | settings)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return compare(made(tmp_path_factory.mktemp("seeds") / "grid"))


def test_a_line_over_seeds_has_every_trainings_score_and_their_mean(comparison):
    one = next(s for s in comparison.seeds if s.metric == "acc" and s.quantized)
    for group, members in GROUPS.items():
        values = [one.entries[member].value for member in members]
        assert one.mean(group) == pytest.approx(sum(values) / 3)
    assert one.of("deltas")["softpick"].estimate == pytest.approx(
        one.mean("softpick") - one.mean("softmax")
    )
    assert one.of("deltas")["softpick"].p_holm is not None
    assert set(one.of("damages")) == set(GROUPS)
    assert set(one.of("differences")) == {"softpick"}


def test_tables_show_means_intervals_and_each_training(comparison):
    text = render(comparison)
    assert "over seeds (3 of softmax, 3 of softpick): Δ = softpick − softmax" in text
    assert "over seeds: damage, and softpick’s − softmax’s" in text
    assert "| softmax.1" not in text  # a table of six checkpoints would say less
    for block in text.split("### ")[1:]:
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) == 1


def test_seeds_that_outweigh_documents_are_said_to(tmp_path):
    shift = {f"softpick.{n}/{q}": 0.9 * n for n in (1, 2, 3) for q in ("bf16", "gptq-2bit")}
    apart = compare(made(tmp_path / "apart", shift=shift))
    effects = [one.of("deltas")["softpick"] for one in apart.seeds]
    assert all(effect.of_seeds > 0.5 for effect in effects)
    assert "§: most of the uncertainty comes from the seeds" in render(apart)


def test_the_csv_has_every_question(comparison):
    rows = list(csv.DictReader(io.StringIO(table_files(comparison)["seeds.csv"])))
    assert {row["question"] for row in rows} == {"score", "delta", "damage", "did"}
    one = next(r for r in rows if r["question"] == "delta" and r["metric"] == "acc")
    assert len(one["each"].split()) == 3
    assert all(float(each) is not None for row in rows for each in row["each"].split())
    assert float(one["low"]) < float(one["estimate"]) < float(one["high"])
    assert 0 <= float(one["of_seeds"]) <= 1


def test_a_missing_cell_takes_its_line_over_seeds_away_not_the_others(tmp_path):
    result = compare(made(tmp_path / "grid", missing=("softpick.2/gptq-2bit",)))
    deltas = {(s.quantizer, bool(s.of("deltas"))) for s in result.seeds}
    assert deltas == {("bf16", True), ("gptq-2bit", False)}
    assert "softpick.2/gptq-2bit: missing" in render(result)


def test_a_pair_that_differs_in_the_normalizer_alone_is_told_to(tmp_path):
    how = {member: trained(member) for member in MEMBERS}
    (note,) = training_notes(compare(made(tmp_path / "grid", trained=how), statistics=False))
    assert note.startswith("softmax and softpick were trained alike in all but the")
    del how["softpick.2"]
    unknown = compare(made(tmp_path / "unknown", trained=how), statistics=False)
    assert training_notes(unknown) == []


@pytest.mark.parametrize(
    ("member", "changed", "said"),
    [
        ("softpick.2", {"settings.tokens": 1}, "settings.tokens 400000000 and 1"),
        ("softpick.3", {"seed": 9}, "seed 3 and 9"),
        ("softmax.2", {"data": "b" * 8}, "data aaaaaaaa and bbbbbbbb"),
    ],
)
def test_trainings_that_differ_elsewhere_are_named_below_the_table(tmp_path, member, changed, said):
    how = {one: trained(one) for one in MEMBERS} | {member: trained(member, **changed)}
    text = render(compare(made(tmp_path / "grid", trained=how), statistics=False))
    line = next(line for line in text.splitlines() if said in line)
    assert member in line
    assert "were trained differently, not in the normalizer alone" in line


def test_a_checkpoint_that_was_trained_once_is_shown_beside_the_first(tmp_path):
    """Not left out: three trainings of one kind, and one of the other."""
    names = (*GROUPS["softmax"], "softpick")
    once = {"checkpoints": names, "replicates": {"softmax": GROUPS["softmax"]}}
    store = made(tmp_path / "grid", sizes={"arc_easy": 50}, **once)
    comparison = replace(compare(store), folder="other")
    text = table_files(comparison, ("md",))["tables.md"]
    assert text.startswith("# Results in other (recipe grid): softmax (3 trainings);")
    titles = [line[4:] for line in text.splitlines() if line.startswith("### ")]
    assert titles == [
        "Precisions", "GPTQ over seeds (3 of softmax)", "GPTQ over seeds: damage",
        "GPTQ: Δ = softpick − softmax.1", "GPTQ: damage, and softpick’s − softmax.1’s",
    ]  # fmt: skip
