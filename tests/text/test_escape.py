"""Foreign names in tables: in every format they are text, and numbers stay numbers."""

from __future__ import annotations

import re

import pytest

from qbench.text import for_csv, for_latex, for_markdown, table

HOSTILE = {
    "newline": "a\n\\input{/etc/passwd}",
    "carriage return": "a\r\\immediate\\write18{id}",
    "backslash": "\\end{longtable}\\newpage",
    "comment": "a%b{",
    "tag": "<script>alert(1)</script>",
    "columns": "a|b||c\\|d",
    "link": "[x](javascript:alert(1))",
    "formula": '=HYPERLINK("http://x","y")',
    "full width": "＝1+1",
    "tab": "\t=1",
    "right to left": "abc\u202eexe",
    "surrogate": "a\ud800b",
}
ALL = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)


@ALL
def test_latex_has_no_command_comment_or_line_of_its_own(text):
    safe = for_latex(text)
    assert safe.isascii()
    assert safe.isprintable()  # one line
    commands = set(re.findall(r"\\([A-Za-z]+|.)", safe))
    assert commands <= {"textbackslash", "textless", "textgreater", "textbar", "textasciitilde",
                        "textasciicircum", *"&%$#_{}"}  # fmt: skip
    assert not re.search(r"(?<!\\)[%$#&_]", safe)


@ALL
def test_markdown_has_one_cell_no_tag_and_no_link(text):
    whole = table(["name", "n"], [[text, "1"], ["other", "2"]], align="lr")
    rows = whole.split("\n")
    assert len(rows) == 4
    assert all(row.isprintable() for row in rows)
    for row in rows:
        bare = re.sub(r"\\.", "", row)  # GitHub reads escaped characters first
        assert bare.count("|") == 3
        assert not re.search(r"[<`]|&(?!amp;|lt;)|\]\(", bare)
    assert for_markdown("−1.98, [+0.5, +1.0] ‡≈ × a_b") == "−1.98, [+0.5, +1.0] ‡≈ × a_b"


@ALL
def test_csv_has_no_formula_and_one_line(text):
    safe = for_csv(text)
    assert safe.isprintable()
    assert not re.match(r"\s*[=+\-@＝＋－＠]", safe)


@pytest.mark.parametrize("number", [-1, -1.5e-7, 0.0, float("inf"), None, True])
def test_numbers_stay_numbers_in_csv(number):
    assert for_csv(number) is number
