"""The papers' tables: every number as printed, and what does not add up is found."""

from __future__ import annotations

import dataclasses
import re
from decimal import Decimal
from pathlib import Path

import pytest

from qbench.errors import RecipeError
from qbench.published import printed, table, tables
from qbench.published.check import check, summary

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


def test_table_13_is_found_to_repeat_itself_and_to_equal_table_3():
    graves = [finding for finding in check() if finding.grave]
    kinds = {(finding.where, finding.kind) for finding in graves}
    assert ("Table 13", "duplicate") in kinds
    alike = [f for f in graves if f.kind == "unquantized"]
    assert [f.where for f in alike] == ["Table 13", "Table 13"]
    assert all("within 0.16 of the unquantized ones in Table 3" in f.text for f in alike)


def test_tables_2_and_6_are_found_to_contradict_each_other_on_wikitext():
    found = [f for f in check() if f.kind == "contradiction" and f.grave]
    assert {f.where for f in found} == {"Table 2, Wikitext, Word Perplexity"}
    assert "softmax has 23.85 here and 204.94 in Table 6" in {f.text for f in found}


def test_every_printed_delta_adds_up_to_rounding():
    kinds = [finding.kind for finding in check()]
    assert "delta" not in kinds
    assert kinds.count("rounding") > 0
    assert "162 Δ recomputed" in summary()


def test_a_delta_that_does_not_add_up_is_found(monkeypatch):
    from qbench.published import check as module

    real = table("softpick-table-02")
    row = dict(real.rows[0], delta="+0.15")
    broken = dataclasses.replace(real, rows=(row, *real.rows[1:]))
    monkeypatch.setattr(module, "tables", lambda: [broken])
    assert [(f.kind, f.text) for f in check() if f.grave] == [
        ("delta", "Δ is printed as +0.15, the printed scores give +0.12")
    ]


@pytest.mark.parametrize(
    ("kind", "where", "text", "grave"),
    [
        ("step", "Table 7, Scalable-Softmax, 1983",
         "96.9 where the other 19 rates are multiples of 0.5, as of 200 trials", True),
        ("same scores", "Table 6, Piqa",
         "softpick and rectified-only are identical, 66.27 Acc Norm and 66.43 Acc: two models do "
         "not agree in every metric to the last digit", True),
        ("name", "Table 6 and Table 7",
         "the model beside rectified-only, softmax, softpick is called scalable-softpick in Table "
         "6 and Scalable-Softmax in Table 7", False),
        ("claim", "Section 5, Quantization",
         "“At the 340M scale, when using softpick, the quantized models are consistently better "
         "than when softmax is used”: in Tables 8 to 10 softpick is worse than softmax in 11 of "
         "72 rows and equal in 1", True),
    ],
)  # fmt: skip
def test_what_the_paper_tells_wrongly_is_found_once(kind, where, text, grave):
    found = [finding for finding in check() if finding.kind == kind]
    assert [(one.where, one.text, one.grave) for one in found] == [(where, text, grave)]
    assert text in summary()


@pytest.mark.parametrize("ask", [table, printed])
def test_an_unknown_name_lists_the_known_ones(ask):
    with pytest.raises(RecipeError, match=r"softpick-(340m|table-02)"):
        ask("softpick-7b")
