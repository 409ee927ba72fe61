"""Pictures of the viewer for README and viewer.md: `make pictures`, by Chromium and playwright.

Of results/pair-27m: the answer, a task's documents beside each other, why.
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
PICTURES = {
    "answer": ("light", "", ".headline:has-text('Quantization')"),
    "documents": ("light", f"#view=documents&task=sciq&show=lost&{CELLS}", ".tabulator-row"),
    "why": ("dark", "#view=why", "figure svg circle"),
}


def main() -> None:
    results = Results(Store(DOCS.parent / "results" / "pair-27m"))
    results.comparison(wait=True)
    with Server([results]) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for name, (scheme, view, ready) in PICTURES.items():
            page = browser.new_page(viewport={"width": 1200, "height": 860}, color_scheme=scheme)
            page.goto(server.address + view)
            page.wait_for_selector(ready)
            page.wait_for_timeout(1000)
            page.screenshot(path=DOCS / "pictures" / f"{name}.png")
        browser.close()
        server.shutdown()


if __name__ == "__main__":
    main()
