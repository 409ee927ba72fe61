"""Results of other weights, normalizers, data or settings are refused or named."""

from types import SimpleNamespace

import pytest
from gate_results import CELL, changed, update
from synthetic import make_store

from qbench.errors import ResultsError
from qbench.gate import check


def with_part(folder, cells, part, value):
    store = changed(folder)
    for cell in store.manifest().cells:
        if cell.cell in cells:
            parts = {**store.get(cell).key_parts, part: value}
            update(store, cell.cell, key_parts=parts)
    return store


@pytest.mark.parametrize("part", ["weights", "normalizer"])
def test_results_of_another_checkpoint_are_unusable_unless_asked_for(tmp_path, standard, part):
    store = with_part(tmp_path, [CELL], part, "e" * 64)
    with pytest.raises(ResultsError, match=rf"{CELL}: these results are .*--across {part}"):
        check.check(store, standard)
    result = check.check(store, standard, across=[part])
    assert result.outcome == "pass"
    assert any(note.startswith(part) and CELL in note for note in result.notes)


@pytest.mark.parametrize(
    ("changed_parts", "words"),
    [(["tokenizer"], "of another tokenizer than"), (["weights"], "of other weights than"),
     (["config", "tokenizer"], "of another config.json and another tokenizer than"),
     (None, "of other weights, configuration or tokenizer than")],
)  # fmt: skip
def test_which_files_of_a_checkpoint_differ_is_said(changed_parts, words):
    digests = dict.fromkeys(("weights", "config", "tokenizer"), "a")

    def cells(total, /, **changes):
        files = {} if changed_parts is None else {"checkpoint": digests | changes}
        parts = SimpleNamespace(key_parts={"weights": total, **files})
        return {CELL: SimpleNamespace(record=parts)}

    old, new = cells("1"), cells("2", **dict.fromkeys(changed_parts or (), "b"))
    with pytest.raises(ResultsError, match=words):
        check.require_same(old, new, ())
    assert check.require_same(old, new, ["weights"]) == [f"weights: 1 → 2 in {CELL}"]


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("quantizer", {"name": "hqq-4bit", "bits": 4.0, "group_size": 32}),
        ("versions", {"torch": "2.13.0", "transformers": "5.17.0"}),
        ("code", "c" * 64),
    ],
)
def test_every_other_difference_is_named_and_does_not_fail(tmp_path, good, standard, part, value):
    everywhere = [cell.cell for cell in good.manifest().cells]
    result = check.check(with_part(tmp_path, everywhere, part, value), standard)
    assert result.outcome == "pass"
    assert any(note.startswith(part) and note.endswith("in all 4 cells") for note in result.notes)


def test_results_of_another_recipe_are_unusable(tmp_path, standard):
    store = make_store(tmp_path, sizes={"arc_easy": 50}, quantizers=("bf16",), checkpoints=("x",))
    with pytest.raises(ResultsError, match="has no cell of"):
        check.check(store, standard)


def test_the_same_documents_from_other_files_are_the_same_data(tmp_path, standard):
    from qbench.gate import baseline

    def store_of(name, documents, files):
        store = changed(tmp_path / name)
        for cell in store.manifest().cells:
            parts = store.get(cell).key_parts | {"tasks": {"arc_easy": files}}
            update(store, cell.cell, key_parts=parts, documents={"arc_easy": documents})
        return store

    path = tmp_path / "baseline.tar.xz"
    baseline.make(store_of("old", "a" * 64, "b" * 64), path)
    result = check.check(store_of("moved", "a" * 64, "c" * 64), path)
    assert result.outcome == "pass"
    assert "tasks.arc_easy: bbbbbbbbbbbb… → cccccccccccc… in all 4 cells" in result.notes
    with pytest.raises(ResultsError, match="arc_easy: definition or data of this task differ"):
        check.check(store_of("other", "d" * 64, "b" * 64), path)
