"""A results folder whose names and texts would run as markup, with responses and divergences, and a
server of it."""

import json
import threading

import numpy as np
import pandas as pd
import pytest
from synthetic import make_store

from qbench.records import Question
from qbench.viewer.data import Results, WholeStore
from qbench.viewer.server import Server

HOSTILE = "<img src=x onerror='window.hacked=1'>"
SIZES = {HOSTILE: 90, "lambada_openai": 60, "wikitext": 12}
QUANTIZERS = ("bf16", "gptq-2bit", "hqq-2bit", "gptq-4bit")


def fill(folder, **changes):
    """Like a run of two checkpoints; multiple choice, log-likelihoods, answers, tokens."""
    store = make_store(folder, sizes=SIZES, quantizers=QUANTIZERS, **changes)
    for cell in store.manifest().cells:
        record = store.get(cell)
        if record is None or record.status != "ok":
            continue
        draw = np.random.default_rng(int(cell.key[:8], 16))
        rows = [(HOSTILE, d, r, float(-10 + draw.normal()), False, None, None, 0)
                for d in range(90) for r in range(2)]  # fmt: skip
        answer = f"The answer </script>{HOSTILE} of {cell.quantizer}"
        rows += [("lambada_openai", d, 0, float("nan"), False, answer, None, 0) for d in range(60)]
        columns = ["task", "document", "request", "log_likelihood", "greedy", "answer", "filter",
                   "cut"]  # fmt: skip
        divergences = None
        if cell.quantized:
            divergences = pd.DataFrame(
                {"task": "wikitext", "document": np.repeat(np.arange(12), 5), "request": 0,
                 "tokens": 1, "text": [" a", " <b>", " c", "\n", HOSTILE] * 12,
                 "kl": draw.random(60), "change": draw.normal(size=60)}
            )  # fmt: skip
        outcomes = store.outcomes(record)
        record = record.model_copy(update={"documents": dict.fromkeys(SIZES, 64 * "0")})
        store.put(record, outcomes, pd.DataFrame(rows, columns=columns), divergences)
    return store


def texts(record, task):
    """What was asked; of one task nothing is at hand. The second choice is right."""
    if task == "lambada_openai":
        return {}
    return {
        d: Question(
            ((f"Question {d}: {HOSTILE}", f" yes {d}"), (f"Question {d}: {HOSTILE}", " no")), 1
        )
        for d in range(90)
    }


class Running:
    """A server of folders in a thread."""

    def __init__(self, *folders, texts=texts):
        results = [Results(WholeStore(folder), texts=texts) for folder in folders]
        self.server = Server(results)
        self.address = self.server.address
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def payload(self, name):
        return json.loads(self.server.payload(name))

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("viewer") / "<b>&grid"
    fill(path, failed=("softpick/hqq-2bit",), missing=("softmax/gptq-4bit",))
    return path


@pytest.fixture
def serve():
    """``serve(*folders)``: a server that ends with the test."""
    made = []

    def start(*folders, **options):
        made.append(Running(*folders, **options))
        return made[-1]

    yield start
    for one in made:
        one.close()
