"""The papers' tables: every number as printed, and what does not add up is found."""

import re
from decimal import Decimal
from pathlib import Path

import pytest

from qbench.errors import RecipeError
from qbench.published import deltas, doubts, printed, table, tables

PAPER = Path(__file__).parents[2] / "shared" / "papers" / "softpick.txt"


def test_there_are_tables_2_to_13_of_the_softpick_paper_and_the_sigmoid_figure():
    names = [one.name for one in tables()]
    known = {f"softpick-table-{n:02}" for n in range(2, 14)}
    assert set(names) == {*known, "sigmoid-figure-1"}


@pytest.mark.parametrize(
    ("number", "rows"),
    [(2, 9), (3, 9), (4, 4), (5, 2), (6, 9), (7, 4), (8, 18), (9, 36), (10, 18), (11, 18),
     (12, 36), (13, 18)],
)  # fmt: skip
def test_every_number_stands_as_printed_in_the_paper(number, rows):
    one = table(f"softpick-table-{number:02}")
    assert len(one.rows) == rows
    if not PAPER.exists():
        pytest.skip("the paper's text is not here")
    after = PAPER.read_text().split(f"Table {number}: ", 1)[1]
    body = after.split("\n\n")[0].split("Refer to caption")[0].split("\nTable ")[0]
    pattern = r"(?<![\w=.])[+-]?\d+\.\d+\*?(?![\w%])"
    # Captions have no decimal numbers; the heads of Tables 4, 5 and 7 have thresholds and lengths.
    in_paper = [n for n in re.findall(pattern, body) if n not in ("0.2", "0.3")]
    values = [v for row in one.rows for v in row.values() if v and re.fullmatch(pattern, v)]
    assert values == in_paper


@pytest.mark.parametrize(
    ("name", "row", "softmax", "delta"),
    [
        ("softpick-340m", ("arc_easy", "acc_norm", "none", None), "56.61", "0.12"),
        ("softpick-340m", ("lambada_openai", "perplexity", "hqq", 2.0), "21857842.67",
         "-21854100.86"),
        ("softpick-340m", ("wikitext", "word_perplexity", "bnb", 8.0), "23.95", "0.46"),
        ("softpick-1.8b", ("wikitext", "word_perplexity", "gptq", 2.0), "4660.08", "-4323.86"),
    ],
)  # fmt: skip
def test_a_printed_number_is_found_by_our_words(name, row, softmax, delta):
    found = printed(name)[row]
    assert found.values["softmax"] == Decimal(softmax)
    assert found.delta == Decimal(delta)


def scores(number: int, bits: str) -> list[tuple[str, str]]:
    rows = table(f"softpick-table-{number:02}").rows
    return [
        (row["softmax"], row["softpick"]) for row in rows if row.get("quantization", "") == bits
    ]


def test_table_13_repeats_itself_and_equals_table_3():
    two, three, plain = scores(13, "2-bit"), scores(13, "3-bit"), scores(3, "")
    assert two == three
    gaps = [abs(Decimal(a) - Decimal(b)) for one, other in zip(two, plain, strict=True)
            for a, b in zip(one, other, strict=True)]  # fmt: skip
    assert max(gaps) == Decimal("0.16")
    assert sum("Table 13: all" in one for one in doubts(["Table 13"])) == 3


def test_the_claim_of_the_text_does_not_hold_in_eleven_rows():
    rows = [row for n in (8, 9, 10) for row in table(f"softpick-table-{n:02}").rows]
    gains = [Decimal(row["delta"]) * (1 if row["direction"] == "up" else -1) for row in rows]
    assert (len(rows), sum(g < 0 for g in gains), gains.count(0)) == (72, 11, 1)
    assert "worse than softmax in 11 of 72 rows and equal in 1" in doubts()[-1]


def test_every_printed_delta_adds_up_to_rounding():
    printed, off = deltas()
    assert (printed, len(off)) == (162, 27)
    numbers = [[Decimal(n) for n in re.findall(r"[+-]\d+\.\d+", one)] for one in off]
    assert all(abs(a - b) == Decimal("0.01") for a, b in numbers)


@pytest.mark.parametrize("ask", [table, printed])
def test_an_unknown_name_lists_the_known_ones(ask):
    with pytest.raises(RecipeError, match=r"softpick-(340m|table-02)"):
        ask("softpick-7b")
