"""A page in a real browser, as wide as a test wants it, and what a script on it saw."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)  # fmt: skip  # noqa: E501

TELL = """
<script>
const told = {errors: window.seen};
told.page = [document.documentElement.scrollWidth, document.documentElement.clientWidth];
%s
const note = document.createElement("pre"); note.id = "told";
note.textContent = JSON.stringify(told); window.parent.document.body.append(note);
</script>
</body>"""
WATCH = """<head><script>window.seen = [];
addEventListener("error", (e) => seen.push(e.message));
console.error = (...text) => seen.push(text.join(" "));</script>"""


def browse(page: str, folder: Path, *, width: int, script: str = "") -> tuple[dict, str]:
    """What ``script`` put into ``told`` on the page, with its errors and widths (``page``: of all
    that it holds, and of what is seen), and what the browser logged. In a frame ``width`` pixels
    wide, for windows are not as narrow as a phone."""
    assert CHROMIUM is not None
    watched = page.replace("<head>", WATCH, 1).replace("</body>", TELL % script, 1)
    path = folder / "frame.html"
    path.write_text(
        f'<!doctype html><meta charset="utf-8"><iframe srcdoc="{html.escape(watched)}" '
        f'style="border:0;width:{width}px;height:900px"></iframe>'
    )
    run = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000",
         "--virtual-time-budget=3000", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    found = re.search(r'<pre id="told">(.*?)</pre>', run.stdout, re.DOTALL)
    assert found, run.stderr[-2000:]
    return json.loads(html.unescape(found[1])), run.stderr
