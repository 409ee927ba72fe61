"""The page in a real browser: clicks from the answer to a token, hostile names, phones, exports."""

import shutil
from functools import partial
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
from small_recipe import DEMO, blocks, qbench, small_recipe
from viewer.conftest import HOSTILE, Running, fill, texts

from qbench.cli.view import document_texts
from qbench.store import Sources, Store
from qbench.viewer import server
from qbench.viewer.data import Results
from qbench.viewer.server import write_site

RESULTS = Path(__file__).parents[2] / "results"
AXE = Path(server.__file__).parent / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
CHROMIUM = shutil.which("chromium")
sync_api = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here"),
    pytest.mark.usefixtures("few_rounds"),
]
ARGUMENTS = ["--no-sandbox", "--headless", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page that must not log, fail, run foreign code or ask another host."""
    seen = []
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(10_000)
    page.on("console", lambda message: seen.append(message.text))
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(
        ("http://127.0.0.1", "file:", "data:", "blob:")) else seen.append(asked.url))  # fmt: skip
    yield page
    assert page.evaluate("window.hacked") is None
    assert seen == []
    page.close()


@pytest.fixture(scope="module")
def at():
    """``at(folder, texts=None)``: a server of results that stay as they are, compared once."""
    servers = {}

    def start(folder, texts=None):
        if folder not in servers:
            servers[folder] = Running(folder, texts=texts)
            servers[folder].server.results[0].comparison(wait=True)
        return servers[folder]

    yield start
    for one in servers.values():
        one.close()


@pytest.fixture
def served(at, folder):
    return at(folder, texts)


@pytest.fixture
def opened(served, page):
    page.goto(served.address)
    page.wait_for_selector(".headline:has-text('KL')")  # then tables are not built anew any more
    page.wait_for_selector(".drawing svg circle[data-href]")
    return served


def test_from_the_answer_to_a_document_and_back(opened, page):
    assert "softpick" in page.inner_text(".headline")
    page.locator("figure svg circle[data-href]").first.click()
    page.wait_for_selector("form[role=search]")
    assert "view=documents" in page.url
    page.locator(".tabulator-row a").first.click()
    page.wait_for_selector("text=What was asked")
    first = page.url
    page.keyboard.press("j")
    page.wait_for_selector("a[rel=prev]")
    assert page.url != first
    page.keyboard.press("k")
    page.wait_for_selector("a[rel=prev]", state="detached")
    assert page.url == first
    page.keyboard.press("u")
    page.wait_for_selector(".tabulator-row")
    page.reload()  # a permanent link
    page.wait_for_selector(".tabulator-row")


def test_lost_documents_are_those_of_the_outcomes_and_the_choice_is_in_the_address(
    served, page, folder
):
    page.goto(f"{served.address}#view=documents&task={HOSTILE}&metric=acc&cell=softmax/gptq-2bit")
    page.wait_for_selector("button.lost")
    store = Store(folder)
    before, after = (
        store.outcomes(store.get(cell)).query("metric == 'acc' and task == @HOSTILE")
        for cell in store.manifest().cells
        if cell.cell in ("softmax/bf16", "softmax/gptq-2bit")
    )
    lost = int(((before["value"].to_numpy() == 1) & (after["value"].to_numpy() == 0)).sum())
    assert page.inner_text("button.lost") == f"lost {lost}"
    page.click("button.lost")
    page.wait_for_selector(f"text={lost} of 90 documents")
    assert "show=lost" in page.url
    page.fill("input[type=search]", "yes question")
    page.wait_for_selector(f'.tabulator-row:has-text("{HOSTILE}")')
    page.fill("input[type=search]", "nowhere")
    page.wait_for_selector("text=0 of 90 documents")


def test_a_document_side_by_side_with_its_text_as_text(served, page):
    cells = "cell=softmax/gptq-2bit&cell=softpick/gptq-2bit"
    page.goto(f"{served.address}#view=document&task={HOSTILE}&document=7&{cells}")
    page.wait_for_selector("tbody tr >> text=yes 7")
    assert f"Question 7: {HOSTILE}" in page.inner_text("pre.text")
    assert page.locator("thead th.n").count() == 6
    assert page.locator("tr.right").inner_text().startswith("no right answer")
    page.goto(f"{served.address}#view=document&task=lambada_openai&document=3&{cells}")
    page.wait_for_selector("text=softpick/gptq-2bit wrote")
    assert page.locator("del").first.inner_text() == "bf16"
    assert "gptq" in page.locator("ins").first.inner_text()
    page.goto(f"{served.address}#view=document&task=wikitext&document=2&{cells}")
    page.wait_for_selector(".tokens span")
    assert page.locator(".tokens").first.locator("span").count() == 5
    assert HOSTILE in page.locator(".tokens").first.inner_text()
    assert "KL" in page.locator(".tokens span").first.get_attribute("title")


def test_a_cell_its_audit_and_what_differs_from_another(served, page):
    page.goto(f"{served.address}#view=cell&cell=softmax/gptq-2bit")
    page.wait_for_selector("text=What ran")
    page.click("summary:has-text('Layer by layer')")
    page.wait_for_selector("figure svg rect")
    page.select_option(".choice select", "softpick/gptq-2bit")
    page.wait_for_selector("text=Key parts that differ")
    page.goto(f"{served.address}#view=cell&cell=softpick/hqq-2bit")
    page.wait_for_selector("text=out of memory")


def test_tables_sort_by_keyboard_and_are_saved(served, page):
    page.goto(f"{served.address}#view=scores")
    page.wait_for_selector(".tabulator-row")
    head = page.locator("[role=columnheader]", has_text="Score")
    head.focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    with page.expect_download() as saved:
        page.click(".downloads button:has-text('CSV')")
    table = pd.read_csv(saved.value.path())
    assert {"Task", "Score", "Damage"} <= set(table.columns)
    assert table["Score"].notna().sum() > 20
    for name in ("Score", "Damage", "Difference of damages"):
        ends = table[[f"{name}, low", name, f"{name}, high"]].dropna().to_numpy()
        assert len(ends) > 4
        assert (ends[:, 0] <= ends[:, 1]).all()
        assert (ends[:, 1] <= ends[:, 2]).all()
    assert set(table["Kind"]) == {"difference", "log ratio"}
    page.goto(served.address)
    with page.expect_download() as saved:
        page.locator(".downloads button:has-text('SVG')").first.click()
    assert saved.value.path().read_text().startswith("<svg")


def test_methods_stand_where_the_number_stands(opened, page):
    page.locator(".method summary").first.click()
    note = page.locator(".method[open] [role=note]")
    assert "whole vocabulary" in note.inner_text()
    assert note.locator("math").count() == 1
    page.keyboard.press("Escape")
    assert page.locator(".method[open]").count() == 0
    page.locator("section:has(h2:has-text('Cells')) .method summary").click()
    assert "nats per token" in page.locator(".method[open] dl").inner_text()
    page.keyboard.press("4")
    page.wait_for_selector("h2:has-text('Methods')")
    assert page.locator("math").count() > 8


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


DOCUMENTS = f"#view=documents&task={HOSTILE}&cell=softmax/gptq-2bit&cell=softpick/gptq-2bit"
QUICK_VIEWS = (("", "light"), (DOCUMENTS, "dark"))
VIEWS = ("", DOCUMENTS, "#view=scores", "#view=why", "#view=methods",
         "#view=cell&cell=softmax/gptq-2bit",
         f"#view=document&task={HOSTILE}&document=1&cell=softmax/gptq-2bit")  # fmt: skip


@pytest.mark.parametrize(
    ("view", "theme"),
    [*QUICK_VIEWS, *(slow(*each) for each in product(VIEWS, ("light", "dark"))
                     if each not in QUICK_VIEWS)],
    ids=lambda part: part[6:18] or part or "overview",
)  # fmt: skip
def test_axe_finds_nothing_and_no_view_scrolls_sideways_on_a_phone(served, page, view, theme):
    page.set_viewport_size({"width": 400, "height": 800})
    page.goto(served.address + view)
    page.wait_for_selector("main .card, main .note, main h2")
    page.wait_for_timeout(300)
    wide, seen = page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert wide <= seen
    page.set_viewport_size({"width": 1280, "height": 800})
    if not AXE.is_file():
        pytest.skip("axe-core is not installed: `npm ci` in qbench/viewer/frontend")
    page.evaluate(AXE.read_text())
    page.emulate_media(color_scheme=theme)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []


def test_points_of_charts_and_rows_open_their_cell_by_keyboard_and_mouse(opened, page):
    """A chart is one stop of the keyboard, and arrows go from point to point."""
    charts = page.locator(".drawing")
    assert page.locator(".drawing :is(a, [tabindex])").count() == 0
    charts.first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    says = page.locator("output.says").first.inner_text()
    assert says == page.locator("[data-current]").get_attribute("data-label")
    page.keyboard.press("Enter")
    page.wait_for_url("**view=cell**")
    page.goto(opened.address)
    figure = page.locator("figure:has(h2:has-text('against bits'))")
    before = figure.locator("h2").inner_text()
    choice = page.locator("label:has-text('Quality') select")
    choice.select_option(choice.locator("option", has_text="Acc").first.get_attribute("value"))
    page.wait_for_url("**metric=*")
    assert figure.locator("h2").inner_text() != before
    figure.locator("svg path[data-href]").first.click()
    page.wait_for_selector("h2:has-text('What ran')")
    page.goto(opened.address)
    cell = page.locator(".tabulator-row", has_text="softmax/bf16").locator(".tabulator-cell").last
    cell.scroll_into_view_if_needed()
    drawn = cell.element_handle()
    page.wait_for_timeout(300)
    assert drawn.evaluate("node => node.isConnected")  # a cell drawn anew would lose a click
    cell.click()
    page.wait_for_selector("h2:has-text('What ran')")


def test_a_run_in_progress_fills_in_by_itself(serve, tmp_path, page):
    folder = fill(tmp_path / "run", missing=("softpick/gptq-4bit",)).directory
    page.goto(serve(folder).address)
    page.wait_for_selector(".missing")
    fill(folder)
    page.wait_for_selector(".missing", state="detached")
    page.wait_for_selector(".headline:has-text('KL')")


def test_an_empty_and_a_damaged_folder(serve, tmp_path, page):
    cells = [f"{c}/{q}" for c in ("softmax", "softpick")
             for q in ("bf16", "gptq-2bit", "hqq-2bit", "gptq-4bit")]  # fmt: skip
    empty = fill(tmp_path / "empty", missing=cells).directory
    running = serve(empty)
    page.goto(running.address)
    page.wait_for_selector("text=No cell has a record yet")
    page.goto(f"{running.address}#view=cell&cell=softmax/bf16")
    page.wait_for_selector("[role=alert]")
    (empty / "grid.json").write_text("{")
    page.goto(f"{running.address}#view=scores")
    page.wait_for_selector("[role=alert]:has-text('damaged')")


def test_the_site_opens_from_a_disk(folder, tmp_path, page):
    results = Results(Store(folder), texts=texts)
    site = write_site([results], tmp_path / "site")[0].as_uri()
    page.goto(site)
    page.wait_for_selector(".headline:has-text('KL')")
    page.goto(f"{site}#view=document&task=wikitext&document=2&cell=softmax/gptq-2bit")
    page.wait_for_selector(".tokens span")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pair-27m", "seeds-27m-kv", "published-27m-gguf"])
def test_real_results_from_the_answer_to_a_document_and_why(at, page, name):
    """Two models, seeds of two, and published files of one."""
    real = RESULTS / name
    running = at(real)
    page.goto(running.address)
    page.wait_for_selector(".drawing svg [data-href]", state="attached")
    assert "KL" in page.inner_text(".headline")
    assert page.locator("figure:has(h2:has-text('against bits')) svg").count()
    cell = Store(real).manifest().cells[-1].cell
    page.goto(f"{running.address}#view=documents&task=lambada_openai&cell={cell}")
    page.locator(".tabulator-row a").first.click()
    page.wait_for_selector("text=What was asked")
    page.goto(f"{running.address}#view=why")
    page.wait_for_selector("h2, [role=alert], main p")


def test_a_demo_run_has_its_texts_and_right_answers(serve, tmp_path, page, own_cache):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "In the old town of"}\n')
    answers = {"prompts": str(prompts), "max_new_tokens": 8}
    one = blocks("softpick")
    recipe = small_recipe(tmp_path, checkpoints=one, tasks=["demo_choice"], answers=answers)
    assert qbench("run", recipe, "--out", tmp_path / "out", "--device", "cpu") == 0
    sources = Sources(DEMO / "data", DEMO / "tasks")
    running = serve(tmp_path / "out", texts=partial(document_texts, sources))
    cells = "cell=softpick/fp32&cell=softpick/rtn-4bit"
    page.goto(f"{running.address}#view=document&task=demo_choice&document=1&{cells}")
    page.wait_for_selector("tr.right >> text=right answer")
    assert page.locator("tr.right").count() == 1
    assert page.locator("pre.text").first.inner_text()
    page.goto(f"{running.address}#view=document&task=answers&document=0&cell=softpick/rtn-4bit")
    page.wait_for_selector("h2:has-text('softpick/fp32 answered, read by rtn-4bit')")
    assert page.locator("pre.text").inner_text() == "In the old town of"
    assert page.locator(".tokens").first.locator("span").count() == 8
    assert "KL" in page.locator(".tokens span").first.get_attribute("title")
    store = Store(tmp_path / "out")
    cell = next(cell for cell in store.manifest().cells if cell.cell == "softpick/rtn-4bit")
    table = store.responses(store.get(cell))
    (answer,) = table[table["task"] == "answers"]["answer"]
    assert page.locator(".tokens").last.evaluate("node => node.textContent") == answer
