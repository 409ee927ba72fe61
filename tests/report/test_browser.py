"""The page in a real browser: sorting, filtering, colours, and nothing cut on a phone."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from browser import CHROMIUM, browse

SCRIPT = """
const data = document.querySelector("#table-scores-points");
const column = [...data.querySelectorAll("thead th")].findIndex(
  (head) => head.textContent.trim() === "softpick");
const values = () => [...data.querySelectorAll("tbody tr:not([hidden])")]
  .map((row) => row.cells[column].dataset.sort).map((text) => text === undefined ? null : +text);
const head = data.querySelectorAll("thead th")[column];
head.querySelector("button").click();
told.up = values(); told.upState = head.getAttribute("aria-sort");
head.querySelector("button").click();
told.down = values(); told.downState = head.getAttribute("aria-sort");
const input = data.querySelector("input");
input.value = "HQQ  acc"; input.dispatchEvent(new Event("input"));
told.filtered = [...data.querySelectorAll("tbody tr:not([hidden])")].map((r) => r.textContent);
told.output = data.querySelector("output").textContent;
input.value = ""; input.dispatchEvent(new Event("input"));
told.all = values().length;
const colour = () => getComputedStyle(document.body).backgroundColor;
told.theme = [colour()]; document.getElementById("theme").click(); told.theme.push(colour());
told.drawings = [...document.querySelectorAll("figure svg")].map((svg) => {
  const box = svg.getBoundingClientRect(), frame = svg.parentElement.getBoundingClientRect();
  return box.left >= frame.left && box.right <= frame.right && box.width > 300;
});
const first = document.querySelector("#table-differences-points .scroll");
const edges = () => {
  const [frame, row] = [first.getBoundingClientRect(), first.querySelector("tbody tr")];
  return [...row.cells].map((cell) => {
    const box = cell.getBoundingClientRect();
    return box.left >= frame.left - 1 && box.right <= frame.right + 1;
  });
};
told.seen = edges();
first.scrollLeft = 10000;
told.scrolled = edges();
const interval = [...first.querySelectorAll("thead th")].find((head) =>
  head.textContent.includes("interval"));
interval.querySelector("button").click();
told.intervals = [...first.querySelectorAll("tbody tr")].map((row) =>
  Number(row.cells[interval.cellIndex].dataset.sort));
told.broken = [];
const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
for (let text = walker.nextNode(); text; text = walker.nextNode()) {
  if (!text.parentElement.closest("td")) continue;
  for (const word of text.data.matchAll(/[\\w.]{2,16}(?![\\w.])/g)) {
    const range = document.createRange();
    range.setStart(text, word.index); range.setEnd(text, word.index + word[0].length);
    const tops = new Set([...range.getClientRects()].map((box) => box.top));
    if (tops.size > 1) told.broken.push(word[0]);
  }
}
"""


@pytest.fixture(scope="module", params=[1280, 390], ids=["desk", "phone"])
def browsed(request, page, tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    return browse(page, tmp_path_factory.mktemp("browser"), width=request.param, script=SCRIPT)


def test_a_click_sorts_and_another_turns_the_order_with_empty_cells_last(browsed):
    told, _ = browsed
    up, down = ([v for v in told[name] if v is not None] for name in ("up", "down"))
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)
    assert len(set(up)) > 5
    assert told["up"][-2:] == told["down"][-2:] == [None, None]
    assert (told["upState"], told["downState"]) == ("ascending", "descending")


def test_the_filter_keeps_rows_with_every_word_and_says_how_many(browsed):
    told, _ = browsed
    assert len(told["filtered"]) == 3
    assert all("hqq" in row and "Acc" in row for row in told["filtered"])
    assert told["output"] == "3 of 12 rows"
    assert told["all"] == 12


def test_light_and_dark_are_one_button_apart(browsed):
    told, _ = browsed
    assert len(set(told["theme"])) == 2


def test_the_page_itself_never_scrolls_sideways(browsed):
    content, window = browsed[0]["page"]
    assert content <= window


def test_no_word_of_a_table_is_broken_over_two_lines(browsed):
    assert browsed[0]["broken"] == []


def test_no_figure_is_cut(browsed):
    drawings = browsed[0]["drawings"]
    assert len(drawings) > 5
    assert all(drawings)


def test_the_difference_of_damages_is_in_sight_and_its_keys_stay_when_scrolled(browsed):
    told, _ = browsed
    assert told["seen"][:4] == [True] * 4  # task, metric, quantizer, difference
    assert told["scrolled"][:3] == [True] * 3


def test_intervals_sort_by_number(browsed):
    lows = browsed[0]["intervals"]
    assert len(set(lows)) > 2
    assert lows == sorted(lows)


def test_the_console_stays_silent(browsed):
    told, logged = browsed
    assert told["errors"] == []
    assert not re.search(r"CONSOLE|Refused to|violates", logged)


@pytest.mark.skipif(CHROMIUM is None or not shutil.which("pdftotext"),
                    reason="needs Chromium and pdftotext")  # fmt: skip
def test_a_printed_table_has_its_head_on_every_page(page, tmp_path):
    """With 20 times as many rows, so that it needs several pages."""
    first, body, rest = re.split(r"(?<=<tbody id=\"body-scores-points\">)(.*?)(?=</tbody>)", page,
                                 maxsplit=1, flags=re.DOTALL)  # fmt: skip
    path, printed = tmp_path / "page.html", tmp_path / "page.pdf"
    path.write_text(first + 20 * body + rest)
    subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer",
         f"--user-data-dir={tmp_path / 'profile'}", f"--print-to-pdf={printed}", path.as_uri()],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    text = subprocess.run(["pdftotext", "-layout", printed, "-"], capture_output=True, text=True,
                          check=True).stdout  # fmt: skip
    row = re.compile(r"^ *(arc_easy|lambada_openai|wikitext) +(Acc|Perp|Word)", re.MULTILINE)
    heads = [bool(re.search("^ *Task +Metric +Quantizer", one, re.MULTILINE))
             for one in text.split("\f") if len(row.findall(one)) > 20]  # fmt: skip
    assert len(heads) > 4
    assert all(heads)
