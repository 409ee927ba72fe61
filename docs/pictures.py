"""Take pictures of the viewer for README and docs (`make pictures`) with Chromium and playwright.

Of results/pair-27m: the answer, documents of a task, why. Of results/published-27m: quality
against size.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from playwright.sync_api import sync_playwright

from qbench.store import Store
from qbench.viewer.data import Results
from qbench.viewer.server import Server

DOCS = Path(__file__).parent
CELLS = "cell=softmax/gptq-3bit&cell=softpick/gptq-3bit"
SIZES = "figure:has(h2:has-text('against bits'))"
PICTURES = {  # file: results, colours, view, what is there when it is ready, what is shown of it
    "answer": ("pair-27m", "light", "", ".drawing svg circle[data-href]", "html"),
    "documents": (
        *("pair-27m", "light", f"#view=documents&task=sciq&show=lost&{CELLS}"),
        *(".tabulator-row", "html"),
    ),
    "why": ("pair-27m", "dark", "#view=why", "figure svg circle", "html"),
    "sizes": ("published-27m", "light", "", f"{SIZES} svg", SIZES),
}


def main() -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for name, (folder, scheme, view, ready, part) in PICTURES.items():
            results = Results(Store(DOCS.parent / "results" / folder))
            results.comparison(wait=True)
            with Server([results]) as server:
                threading.Thread(target=server.serve_forever, daemon=True).start()
                page = browser.new_page(
                    viewport={"width": 1200, "height": 860}, color_scheme=scheme
                )
                page.goto(server.address + view)
                page.wait_for_selector(ready)
                page.wait_for_timeout(1000)
                path = DOCS / "pictures" / f"{name}.png"
                if part == "html":
                    page.screenshot(path=path)
                else:
                    page.locator(part).screenshot(path=path)
                server.shutdown()
        browser.close()


if __name__ == "__main__":
    main()
