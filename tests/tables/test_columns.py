"""Every column of tables.csv is explained in one table of the docs."""

import re
from pathlib import Path

from qbench.tables.frames import COLUMNS

PAGE = Path(__file__).parents[2] / "docs" / "tables.md"


def test_every_column_is_in_the_table_of_the_docs():
    table = PAGE.read_text().split("## tables.csv")[1]
    names = set(re.findall(r"`([a-z0-9_…]+)`", table))
    contrasts = [name.removesuffix("…") for name in names if re.fullmatch(r"[a-z]+…", name)]
    endings = [name.removeprefix("…") for name in names if name.startswith("…")]
    shown = {contrast + ending for contrast in contrasts for ending in ["", *endings]}
    assert set(COLUMNS) - names - shown == set()
