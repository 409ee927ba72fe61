"""Check a checkpoint's chat template before anything is loaded. Imports no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SECONDS, MEMORY_GIB, MOST_CHARACTERS = 20, 2, 1_000_000
PROGRAM = f"""
import datetime, json, re, resource, sys
from jinja2 import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

def refuse(message):
    raise RuntimeError(message)

resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_GIB << 30}, {MEMORY_GIB << 30}))
settings = dict(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
environment = ImmutableSandboxedEnvironment(**settings)
environment.filters["tojson"] = lambda value, **_: json.dumps(value)
environment.globals["raise_exception"] = refuse
environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
source = re.sub(r"{{%-?\\s*(end)?generation\\s*-?%}}", "", sys.stdin.read())  # of transformers
try:
    template = environment.from_string(source)
    messages = [dict(role="user", content="a")]
    text = template.render(messages=messages, add_generation_prompt=True, tools=None)
    if len(text) > {MOST_CHARACTERS}:
        print(f"it makes {{len(text):,}} characters of one short question")
except TemplateSyntaxError as error:
    print(f"line {{error.lineno}}: {{error.message}}")
except (MemoryError, OverflowError):
    print("it needs more than {MEMORY_GIB} GiB for one short question")
except Exception:
    pass  # it may want other messages than this one
"""


def read_template(folder: Path) -> str | None:
    """Return the default chat template of a checkpoint's ``folder``; None if it has none."""
    file = folder / "chat_template.jinja"
    try:
        if file.is_file():
            return file.read_text()
        template = json.loads((folder / "tokenizer_config.json").read_bytes())["chat_template"]
        if isinstance(template, list):  # several by name
            template = {entry["name"]: entry["template"] for entry in template}["default"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return template if isinstance(template, str) and template else None


def template_problem(template: str) -> str | None:
    """Render a chat template for one short question, in a process of bounded time and memory.

    Returns why the template cannot be used; None if it can, as far as that is known.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            input=template, capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it takes more than {SECONDS} s for one short question"
    return done.stdout.strip() or None
