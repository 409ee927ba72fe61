"""Which of our own code is part of a cell's key."""

from qbench.files import PACKAGE, SCORING, digest_of


def test_a_changed_a_new_and_a_renamed_module_change_the_digest(tmp_path):
    (tmp_path / "room").mkdir()
    one, other = tmp_path / "room" / "a.py", tmp_path / "room" / "b.py"
    one.write_text("x = 1\n")
    found = [digest_of([tmp_path / "room"])]
    other.write_text("x = 1\n")
    found.append(digest_of([tmp_path / "room"]))
    other.rename(tmp_path / "room" / "c.py")
    found.append(digest_of([tmp_path / "room"]))
    one.write_text("x = 2\n")
    found.append(digest_of([tmp_path / "room"]))
    assert len({*found}) == 4
    (tmp_path / "room" / "c.py").unlink()
    one.write_text("x = 1\n")
    assert digest_of([tmp_path / "room"]) == found[0]


def test_every_module_that_a_cell_imports_while_it_computes_is_there_or_decides_nothing():
    """A new module or package stands in one of the two lists before it is used."""
    without_effect = {
        "__init__.py", "__main__.py", "analysis", "api.py", "bench", "budget",
        "cli", "comparison", "errors.py", "export.py", "export_model.py",
        "files.py", "gate", "hub.py",
        "machine.py", "plan.py", "plugins.py", "progress.py",
        "published",
        "recipe.py", "recipes",
        "records.py", "removed.py", "runner", "statistics", "store.py", "tables",
        "tasks", "text.py", "training", "viewer",
    }  # fmt: skip
    found = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert found - without_effect == set(SCORING)
