"""The HTML page of tables in a real browser, on a desk and on a phone; names as long as may be."""

from __future__ import annotations

import pytest
from browser import CHROMIUM, browse
from synthetic import make_store

from qbench.comparison.compare import compare
from qbench.tables import render

LONG = "softpick_" + 10 * "340m_" + "end"
SCRIPT = """
told.boxes = [...document.querySelectorAll(".scroll")].map((box) => {
  box.scrollLeft = 1e5;
  const frame = box.getBoundingClientRect();
  const seen = (cell) => {
    const {left, right, top, height} = cell.getBoundingClientRect();
    const [x, y] = [(left + right) / 2, top + height / 2];
    if (left < frame.left - 1 || right > frame.right + 1) return false;
    cell.scrollIntoView({block: "center", inline: "nearest"});
    const now = cell.getBoundingClientRect();
    return document.elementFromPoint(x, now.top + now.height / 2) === cell
      && cell.scrollWidth <= cell.clientWidth;
  };
  const keys = [...box.querySelectorAll("tr")].map((row) => [...row.cells].slice(0, 3).map(seen));
  const caption = document.createRange(); caption.selectNodeContents(box.querySelector("caption"));
  const title = caption.getBoundingClientRect();
  return {scrolled: box.scrollLeft, keys, room: frame.right - box.querySelector("tr").cells[2]
    .getBoundingClientRect().right, title: title.left >= frame.left && title.right <= frame.right};
});
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(
        tmp_path_factory.mktemp("pages") / ("grid_of_" + 9 * "models_"),
        checkpoints=("softmax", LONG),
        sizes={"arc_easy": 53, "lambada_openai": 71, "wikitext": 9},
        quantizers=("bf16", "gptq-2bit"),
        failed=(f"{LONG}/gptq-2bit",),
    )


@pytest.fixture(scope="module", params=[1280, 390], ids=["desk", "phone"])
def browsed(request, store, tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    page = render(compare(store), format="html")
    folder = tmp_path_factory.mktemp("browser")
    return browse(page, folder, width=request.param, script=SCRIPT)[0]


def test_the_page_itself_never_scrolls_sideways(browsed):
    content, window = browsed["page"]
    assert content <= window


def test_a_wide_table_scrolls_in_its_box_and_what_a_row_is_of_stays_in_sight(browsed):
    assert browsed["boxes"]
    for box in browsed["boxes"]:
        assert box["scrolled"] > 100
        assert len(box["keys"]) > 4
        assert all(all(row) for row in box["keys"])
        assert box["title"]
        assert box["room"] > 80  # pixels, for a number beside them
