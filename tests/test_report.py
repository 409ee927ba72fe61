"""The HTML report: whole, self-contained, and working in a real browser."""

from __future__ import annotations

import html
import itertools
import json
import multiprocessing
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from synthetic import key, make_store

from qbench import report
from qbench.comparison.compare import compare
from qbench.comparison.floors import to_bytes
from qbench.errors import RecipeError, UnavailableError
from qbench.record import Damage
from qbench.report.content import data_tables
from qbench.report.costs import label_points
from qbench.report.drawing import helper, plates
from qbench.report.write import worth_sharing
from qbench.store import Store

SIZES = {"arc_easy": 120, "lambada_openai": 100, "wikitext": 12}
QUANTIZERS = ("bf16", "gptq-2bit", "gptq-4bit", "hqq-2bit")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)  # fmt: skip  # noqa: E501
ABOUT = {"stderr": 0.01, "documents": 120}
DAMAGE = Damage.model_validate(
    {
        "tasks": {
            "arc_easy": {
                "distributions": {
                    "tokens": 4321,
                    "kl": {"mean": 0.0421, "median": 0.02, "p90": 0.1, "p99": 0.61, "p99_9": 1.0,
                           "largest": 2.0},
                    "top1_agreement": 0.913,
                    "target_change": {"value": -0.1, **ABOUT},
                },
                "flips": {"acc": {"documents": 120, "right_to_wrong": 7, "wrong_to_right": 4}},
                "correct_answer": {"value": -0.0312, **ABOUT},
            }
        }
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    store = make_store(
        tmp_path_factory.mktemp("report") / "<b>&grid",
        sizes=SIZES,
        quantizers=QUANTIZERS,
        shift={"softmax/hqq-2bit": 1.0},
        failed=("softpick/gptq-2bit",),
        missing=("softmax/gptq-4bit",),
    )
    for cell in store.grid().cells:
        record = store.get(cell)
        if record is not None and record.status == "ok" and cell.bits:
            store.put(record.model_copy(update={"damage": DAMAGE}), store.outcomes(record), None)
    paths = report.write(store, figures=("svg", "png", "pdf"), published="softpick-340m")
    return store, paths


@pytest.fixture(scope="module")
def page(written):
    return written[1][0].read_text()


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
        if tag not in ("meta", "link", "input", "br"):
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
    sections = {"scores", "damage", "distributions", "costs", "audit", "provenance"}
    assert sections <= set(outline.ids)


def test_every_figure_has_a_name_that_can_be_read_aloud(outline):
    drawings = [named for tag, named in outline.tags if tag == "svg"]
    assert len(drawings) == 3 + 3 + 4
    assert all(named["role"] == "img" and len(named["aria-label"]) > 20 for named in drawings)


def test_every_table_has_a_caption_and_scoped_heads(outline):
    tags = [tag for tag, _ in outline.tags]
    assert tags.count("table") == tags.count("caption") == 6
    assert all("scope" in named for tag, named in outline.tags if tag == "th")


def test_failed_and_missing_cells_are_named_with_their_reasons(page):
    assert "softpick/gptq-2bit: failed: out of memory | while quantizing layer 3" in page
    assert "softmax/gptq-4bit: missing: no record; run the recipe again" in page


def test_names_are_escaped(page):
    assert "&lt;b&gt;&amp;grid" in page
    assert "<b>&grid" not in page


def test_damage_measured_in_the_forwards_is_shown(page):
    assert "91.3%" in page
    assert "−0.0312" in page


def test_figures_are_written_in_every_format_asked_for(written):
    _, paths = written
    names = {path.name for path in paths[1:]}
    stems = {path.stem for path in paths[1:]}
    assert stems >= {"scores-arc_easy", "damage-wikitext", "kl", "flips", "size", "stages"}
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
    assert "Difference of damages" not in text


def test_the_summary_counts_what_the_lines_say(written):
    sentences = report.summary(compare(written[0]))
    told = next(s for s in sentences if s.startswith("Quantization costs softpick less"))
    assert re.search(r"in \d+ of 5 comparisons \([1-5] significantly\)", told)


def test_deltas_below_the_noise_floor_are_marked_and_the_mark_is_explained(tmp_path):
    store = make_store(tmp_path, sizes=SIZES, quantizers=("bf16", "hqq-2bit"))
    floors = {"arc_easy": {"acc": 1.0}, "wikitext": {"word_perplexity": 0.0}}
    noise = {
        f"{c}/bf16": {"key": key(c, "bf16"), "floors": floors} for c in ("softmax", "softpick")
    }
    (tmp_path / "noise.json").write_bytes(to_bytes(noise))
    table = data_tables(compare(store))[0]
    delta = table.head.index("Δ softpick")
    marked = {(row[0].text, row[1].text) for row in table.rows if row[delta].text.endswith("≈")}
    assert marked == {("arc_easy", "Acc ↑")}
    assert "≈: no larger than" in table.caption


def test_columns_without_anything_are_left_out(written, tmp_path):
    def head(store):
        return next(t.head for t in data_tables(compare(store)) if t.name == "audit")

    assert "Why" in head(written[0])
    sound = make_store(tmp_path, sizes=SIZES, quantizers=("bf16", "hqq-2bit"))
    assert not {"Why", "Left out"} & set(head(sound))


def test_names_of_close_points_do_not_cover_each_other():
    figure = Figure(figsize=(6, 4), dpi=100)
    axes = figure.subplots()
    points = [(3.2, 39.1), (3.7, 38.4), (4.2, 39.0), (4.5, 39.2), (2.2, 31.0)]
    axes.plot(*zip(*points, strict=True), "o")
    labels = [(*point, "gptq-3bit", checkpoint) for checkpoint in (0, 1) for point in points]
    label_points(axes, labels, points)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == len(labels)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


# Drawing in two processes


@pytest.fixture(scope="module")
def comparison(written):
    return compare(written[0])


def test_two_processes_draw_the_same_figures(comparison, tmp_path):
    alone = plates(comparison, tmp_path / "alone", report.FIGURE_FORMATS)
    with helper() as other:
        both = other.plates(comparison, tmp_path / "both", report.FIGURE_FORMATS)
    assert [(one.name, one.caption, one.svg) for one in both] == [
        (one.name, one.caption, one.svg) for one in alone
    ]
    for one, same in zip(alone, both, strict=True):
        assert [p.read_bytes() for p in one.paths] == [p.read_bytes() for p in same.paths]
    assert multiprocessing.active_children() == []


def test_an_error_in_the_other_process_is_raised_in_this_one(comparison, tmp_path):
    (tmp_path / "scores-lambada_openai.svg").mkdir()  # of the second group
    with helper() as other, pytest.raises(IsADirectoryError, match="scores-lambada_openai"):
        other.plates(comparison, tmp_path, ("svg",))


def test_the_death_of_the_other_process_is_told(comparison, tmp_path):
    with helper() as other:
        (process,) = multiprocessing.active_children()
        process.kill()
        with pytest.raises(UnavailableError, match="was killed"):
            other.plates(comparison, tmp_path, ("svg",))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_other_process_ends_with_one_that_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing, time\n"
        "from qbench.report.drawing import helper\n"
        "if __name__ == '__main__':\n"
        "    with helper():\n"
        "        print(multiprocessing.active_children()[0].pid, flush=True)\n"
        "        time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    for _ in range(200):
        try:  # gone, or a zombie where nobody collects it
            if Path(f"/proc/{child}/stat").read_text().rsplit(")")[-1].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.1)
    pytest.fail(f"process {child} goes on")


def test_a_second_process_is_for_large_grids_and_other_formats_than_the_page_has(written):
    grid = written[0].grid()
    assert not worth_sharing(grid, report.FIGURE_FORMATS)
    large = grid.model_copy(update={"cells": grid.cells * 3})
    assert worth_sharing(large, report.FIGURE_FORMATS)
    assert not worth_sharing(large, ("svg",))


# In the browser

SCRIPT = """
<script>
const told = {errors: window.seen};
const data = document.querySelector("#table-scores");
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
told.page = [document.documentElement.scrollWidth, window.innerWidth];
const note = document.createElement("pre"); note.id = "told";
note.textContent = JSON.stringify(told); document.body.append(note);
</script>
</body>"""
WATCH = """<head><script>window.seen = [];
addEventListener("error", (e) => seen.push(e.message));
console.error = (...text) => seen.push(text.join(" "));</script>"""


def browse(page: str, folder: Path, *, width: int) -> tuple[dict, str]:
    """What the page's own script saw, and what the browser logged."""
    path = folder / "watched.html"
    path.write_text(page.replace("<head>", WATCH, 1).replace("</body>", SCRIPT, 1))
    run = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900",
         "--virtual-time-budget=3000", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    found = re.search(r'<pre id="told">(.*?)</pre>', run.stdout, re.DOTALL)
    assert found, run.stderr[-2000:]
    return json.loads(html.unescape(found[1])), run.stderr


@pytest.fixture(scope="module", params=[1280, 500], ids=["desk", "phone"])
def browsed(request, page, tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    return browse(page, tmp_path_factory.mktemp("browser"), width=request.param)


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
    assert told["output"] == "3 of 20 rows"
    assert told["all"] == 20


def test_light_and_dark_are_one_button_apart(browsed):
    told, _ = browsed
    assert len(set(told["theme"])) == 2


def test_the_page_itself_never_scrolls_sideways(browsed):
    content, window = browsed[0]["page"]
    assert content <= window


def test_the_console_stays_silent(browsed):
    told, logged = browsed
    assert told["errors"] == []
    assert not re.search(r"CONSOLE|Refused to|violates", logged)


def test_the_page_is_headed_by_its_folder_and_names_the_recipe(written, page, tmp_path):
    store, _ = written
    assert "<h1>&lt;b&gt;&amp;grid</h1>" in page
    assert "Recipe" not in page
    shutil.copytree(store.directory, tmp_path / "pair")
    again = report.write(Store(tmp_path / "pair"), tmp_path, figures=())[0].read_text()
    assert "<h1>pair</h1>" in again
    assert "Recipe &lt;b&gt;&amp;grid: " in again
