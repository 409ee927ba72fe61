"""Which of our own code is part of a cell's key."""

import pytest

from qbench.code import PACKAGE, SCORING, digest_of

CODE = '''"""About."""
# why
def f(x):
    """What."""
    return x + 1  # so
'''


def digest(folder, text, name="a.py"):
    (folder / "room").mkdir(exist_ok=True)
    (folder / "room" / name).write_text(text)
    return digest_of([folder / "room"])


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (CODE.replace("# why\n", "").replace("About", "Other"), True),
        (CODE.replace('    """What."""\n', "").replace("x + 1", "(x\n            + 1)"), True),
        (CODE.replace("x + 1", "x + 2"), False),
        (CODE.replace("x + 1", "x + 1.0"), False),
        (CODE.replace("x + 1", "x - 1"), False),
        (CODE.replace("return", '"""What."""\n    return "" or').replace("1", "''"), False),
    ],
)
def test_code_counts_and_comments_docstrings_and_layout_do_not(tmp_path, text, same):
    assert (digest(tmp_path, CODE) == digest(tmp_path, text)) is same


def test_every_version_of_python_gives_the_same_digest(tmp_path):
    found = digest(tmp_path, CODE + "    return f'{x:>{x}}' '' f'{x=}'\n")
    assert found.startswith("0128d29d535e")


def test_a_new_a_removed_and_a_renamed_module_change_the_digest(tmp_path):
    before = digest(tmp_path, CODE)
    added = digest(tmp_path, CODE, "b.py")
    (tmp_path / "room" / "b.py").rename(tmp_path / "room" / "c.py")
    assert len({before, added, digest_of([tmp_path / "room"])}) == 3
    (tmp_path / "room" / "c.py").unlink()
    assert digest_of([tmp_path / "room"]) == before


def test_every_module_that_a_cell_imports_while_it_computes_is_there_or_decides_nothing():
    """A new module or package stands in one of the two lists before it is used."""
    without_effect = {
        "__init__.py", "__main__.py", "analysis", "api.py", "bench", "cache.py",
        "cli", "cluster", "code.py", "comparison", "errors.py", "export.py", "files.py", "gate",
        "hub.py", "machine.py", "plan.py", "plugins.py", "progress.py", "published", "recipe.py",
        "prequantized.py", "recipe_schema.py", "recipe_yaml.py", "records.py", "runner", "show",
        "show.py", "statistics", "store.py", "tables", "text", "text.py", "training",
        "viewer",
    }  # fmt: skip
    found = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert found - without_effect == set(SCORING)
