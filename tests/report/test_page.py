"""The HTML report: whole, self-contained, and true to its results."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser

import pytest
from synthetic import make_store

from qbench import report
from qbench.comparison.compare import compare
from qbench.errors import RecipeError
from qbench.records import Unavailable
from qbench.report.write import render
from qbench.store import Store

SIZES = {"arc_easy": 120, "lambada_openai": 100, "wikitext": 12}
QUANTIZERS = ("bf16", "gptq-2bit", "gptq-4bit", "hqq-2bit")


class Outline(HTMLParser):
    def __init__(self):
        super().__init__()
        self.ids, self.links, self.tags, self.open = [], [], [], []

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.tags.append((tag, named))
        if "id" in named:
            self.ids.append(named["id"])
        self.links += [named[name] for name in ("href", "src", "xlink:href") if name in named]
        if tag not in ("meta", "link", "input", "br", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def outline(page):
    found = Outline()
    found.feed(page)
    return found


def test_the_page_is_well_formed_and_its_ids_are_unique(outline):
    assert outline.open == []
    assert len(outline.ids) == len(set(outline.ids))


def test_the_page_refers_to_nothing_outside_itself(page, outline):
    assert {link[0] for link in outline.links} <= {"#", "d"}
    assert "default-src 'none'" in page
    known = set(outline.ids)
    assert {link[1:] for link in outline.links if link.startswith("#")} <= known
    assert not re.search(r"url\((?!#)", page)


def test_every_section_of_the_report_is_there(outline):
    wanted = ["damage", "scores", "distributions", "costs", "audit", "settings", "provenance"]
    assert [found for found in outline.ids if found in wanted] == wanted


def test_every_figure_has_a_name_that_can_be_read_aloud(outline):
    drawings = [named for tag, named in outline.tags if tag == "svg"]
    assert len(drawings) == 5 + 3 + 1 + 2  # damage of each metric, scores and KL of tasks, costs
    assert all(named["role"] == "img" and len(named["aria-label"]) > 20 for named in drawings)


def test_every_table_has_a_caption_and_scoped_heads(outline):
    tags = [tag for tag, _ in outline.tags]
    assert tags.count("table") == tags.count("caption") == 2 * 3 + 6
    assert all("scope" in named for tag, named in outline.tags if tag == "th")


def test_failed_and_missing_cells_are_named_with_their_reasons(page):
    assert "softpick/gptq-2bit: failed: out of memory | while quantizing layer 3" in page
    assert "softmax/gptq-4bit: missing: no record; run the recipe again" in page


def test_names_are_escaped(page):
    assert "&lt;b&gt;&amp;grid" in page
    assert "<b>&grid" not in page


def test_damage_measured_in_the_forwards_is_shown(page):
    assert "91.3\u00a0%" in page
    assert "−0.0312" in page


def test_figures_are_written_in_every_format_asked_for(written):
    _, paths = written
    names = {path.name for path in paths[1:]}
    stems = {path.stem for path in paths[1:]}
    assert stems >= {"scores-arc_easy", "damage-wikitext-word_perplexity",
                     "distributions-arc_easy", "size", "stages"}  # fmt: skip
    assert names == {f"{stem}.{format}" for stem in stems for format in report.FIGURE_FORMATS}
    heads = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}
    assert all(path.read_bytes().startswith(heads[path.suffix]) for path in paths[1:])


def test_the_same_results_give_the_same_page(written, page, tmp_path):
    store, _ = written
    again = report.write(store, tmp_path, figures=(), published="softpick-340m")
    assert again[0].read_text() == page


def test_an_unknown_figure_format_names_the_known_ones(written):
    with pytest.raises(RecipeError, match="--figures gif: unknown; possible: svg, png, pdf"):
        report.write(written[0], figures=("gif",))


def test_a_grid_with_nothing_but_failures_still_has_a_page(tmp_path):
    cells = [f"{c}/{q}" for c in ("softmax", "softpick") for q in ("bf16", "hqq-2bit")]
    store = make_store(tmp_path, sizes=SIZES, quantizers=("bf16", "hqq-2bit"), failed=cells)
    (path,) = report.write(store, figures=())
    assert "4 of 4 cells have no sound score" in path.read_text()


def test_one_checkpoint_has_damage_and_no_delta(tmp_path):
    store = make_store(tmp_path, sizes=SIZES, quantizers=QUANTIZERS, checkpoints=("only",))
    (path,) = report.write(store, figures=())
    text = path.read_text()
    assert "Quantization makes only worse in" in text
    assert "Difference of damages:" not in text
    assert "No difference of damages: there is one checkpoint." in text


def test_one_task_is_one_task(tmp_path):
    store = make_store(tmp_path / "r", sizes={"arc_easy": 20}, quantizers=("bf16", "hqq-2bit"))
    report.write(store, None)
    assert "at 2 precisions on 1 task;" in (tmp_path / "r" / "report.html").read_text()


def test_the_summary_counts_what_the_lines_say(written):
    sentences = report.summary(compare(written[0]))
    told = next(s for s in sentences if s.startswith("Quantization costs softpick less"))
    assert re.search(r"in \d+ of 5 comparisons \([1-5] significantly\)", told)


def test_the_page_is_headed_by_its_folder_and_names_the_recipe(written, page, tmp_path):
    store, _ = written
    assert "<h1>&lt;b&gt;&amp;grid</h1>" in page
    shutil.copytree(store.directory, tmp_path / "pair")
    again = report.write(Store(tmp_path / "pair"), tmp_path, figures=())[0].read_text()
    assert "<h1>pair</h1>" in again
    assert "Recipe &lt;b&gt;&amp;grid: " in page
    assert "Recipe &lt;b&gt;&amp;grid: " in again


def test_three_checkpoints_have_a_difference_each(tmp_path):
    names = ("softmax", "softpick", "third")
    store = make_store(tmp_path, sizes=SIZES, quantizers=QUANTIZERS, checkpoints=names)
    text = report.write(store, figures=())[0].read_text()
    assert text.count("<td>softpick</td>") == text.count("<td>third</td>") == 5 * 3
    assert "that checkpoint&#39;s damage by quantization" in text


def test_a_grid_without_an_unquantized_cell_says_why_there_is_no_damage(tmp_path):
    store = make_store(tmp_path, sizes=SIZES, quantizers=("gptq-2bit", "hqq-2bit"))
    text = report.write(store, figures=())[0].read_text()
    assert "No damage: the recipe has no unquantized cell to compare with." in text


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (Unavailable(reason="lm-eval's own scoring has no <i>distributions</i>"),
         "lm-eval&#39;s own scoring has no &lt;i&gt;distributions"),
        (None, "it was not asked for (evaluation.damage)"),
    ],
    ids=["unavailable", "not asked for"],
)  # fmt: skip
def test_cells_without_divergence_are_named_with_the_reason(tmp_path, damage, reason):
    store = make_store(tmp_path, sizes=SIZES, quantizers=("bf16", "hqq-2bit"))
    for cell in store.grid().cells:
        record = store.get(cell)
        if cell.quantized:
            new = record.model_copy(update={"damage": damage})
            store.put(new, store.outcomes(record), None)
    text = report.write(store, figures=())[0].read_text()
    assert f"No divergence for any cell: {reason}" in text


def test_a_raw_escape_byte_of_a_record_reaches_no_page(tmp_path):
    store = make_store(tmp_path, sizes={"arc_easy": 20}, quantizers=("bf16", "hqq-2bit"))
    assert "\x1b" not in render(compare(store), [], [], name="a\x1b[31mb")
