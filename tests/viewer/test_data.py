"""Payloads say what the records say; the server answers nobody else."""

import contextlib
import http.client
import json
import re
import shutil
import threading
from functools import partial
from http import HTTPStatus
from pathlib import Path

import pytest
from small_recipe import qbench
from synthetic import make_store
from viewer.conftest import HOSTILE, fill

from qbench.cli.view import document_texts
from qbench.comparison.compare import compare
from qbench.errors import ResultsError
from qbench.store import Store
from qbench.viewer import data
from qbench.viewer import server as server_module
from qbench.viewer.data import Results, WholeStore
from qbench.viewer.server import write_site

PAIR = Path(__file__).parents[2] / "results" / "pair-27m"
pytestmark = pytest.mark.usefixtures("few_rounds")


def test_the_overview_has_the_effects_of_the_comparison(folder):
    shown = Results(WholeStore(folder)).payload("overview", wait=True)
    lines = {(one.task, one.metric, one.quantizer): one for one in compare(Store(folder)).lines}
    checked = 0
    for one in shown["lines"]:
        line = lines[one["task"], one["metric"], one["quantizer"]]
        for question in ("deltas", "damages", "differences"):
            effects = line.of(question)
            assert one[question].keys() == effects.keys()
            for name, effect in effects.items():
                told = one[question][name]
                assert (told["estimate"], told["low"]) == (effect.estimate, effect.low)
                assert (told["mark"], told["p_holm"]) == (effect.mark, effect.p_holm)
                checked += 1
    assert checked > 20
    assert shown["ready"]
    asked = sum(bool(line["differences"]) for line in shown["lines"])
    found = re.search(
        r"softpick loses more than softmax in \d+ of (\d+) ", " ".join(shown["verdict"])
    )
    assert 0 < int(found[1]) <= asked  # accuracies at chance are not tested


def test_scores_are_there_before_intervals(folder, monkeypatch):
    go_on = threading.Event()

    def slow(store, *, statistics=True):
        if statistics:
            go_on.wait(20)
        return compare(store, statistics=statistics)

    monkeypatch.setattr("qbench.viewer.data.compare", slow)
    results = Results(WholeStore(folder))
    early = results.payload("overview")
    assert (early["ready"], results.ready) == (False, False)
    assert any(score["value"] for line in early["lines"] for score in line["scores"].values())
    go_on.set()
    assert results.payload("overview", wait=True)["ready"]
    assert results.ready


def test_documents_and_tokens_are_the_record_s(folder):
    store = Store(folder)
    results = Results(WholeStore(folder))
    cells = [cell.cell for cell in store.manifest().cells]
    place = cells.index("softmax/gptq-2bit")
    record = store.get(store.manifest().cells[place])
    found = results.payload(f"documents/{place}/0")
    outcomes = store.outcomes(record)
    assert found["outcomes"]["value"] == outcomes[outcomes["task"] == HOSTILE]["value"].tolist()
    assert len(found["responses"]["log_likelihood"]) == 180
    pages = results.payload(f"documents/{place}/2")
    assert pages["by_token"] == list(range(12))
    rows = store.divergences(record)
    tokens = results.payload(f"tokens/{place}/2/3")
    document = rows[rows["document"] == 3]
    assert tokens["samples"][0]["texts"] == document["text"].tolist()
    assert pages["kl"]["kl"][3] == pytest.approx(document["kl"].mean(), abs=1e-6)


def test_a_task_that_failed_in_every_cell_has_no_texts(tmp_path):
    """Its documents are in the records, its scores are not."""
    store = make_store(tmp_path, sizes={"piqa": 5}, quantizers=["bf16"])
    for record in store.records():
        store.put(record.model_copy(update={"documents": {"piqa": 64 * "0"}, "scores": ()}))
    results = Results(store, texts=partial(document_texts, None))
    assert results.payload("texts/0")["missing"] == "No cell has scored this task yet."


@pytest.mark.parametrize("name", ["nothing", "cell/99", "documents/0/9", "cell/../0"])
def test_a_name_that_there_is_none_of_is_refused(folder, name):
    with pytest.raises(KeyError):
        Results(WholeStore(folder)).payload(name)


def test_a_damaged_record_is_named_and_takes_nothing_from_the_others(tmp_path):
    store = fill(tmp_path / "grid")
    cell = next(c for c in store.manifest().cells if c.cell == "softpick/gptq-4bit")
    path = store.path(cell)
    path.write_text(path.read_text().replace('"seconds"', '"secunds"', 1))
    shown = Results(WholeStore(store.directory)).payload("overview", wait=True)
    states = {one["cell"]: one["status"] for one in shown["cells"]}
    assert states.pop("softpick/gptq-4bit") == "missing"
    assert set(states.values()) == {"ok"}
    assert any("damaged" in problem and path.name in problem for problem in shown["problems"])


@pytest.fixture(scope="module")
def analyses(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    shutil.unpack_archive(PAIR / "records.tar.xz", folder, filter="data")
    return folder / "analysis"


@pytest.mark.parametrize(
    "pattern",
    ["records/softpick/hqq-2bit/*.json", "records/softmax/hqq-2bit/*.outcomes.parquet",
     "records/softmax/hqq-2bit/*.responses.parquet",
     "records/softmax/hqq-2bit/*.divergences.parquet",
     "analysis/softmax/bf16/*.json"],
)  # fmt: skip
def test_what_is_published_is_intact_or_not_made(folder, analyses, tmp_path, pattern):
    copy = shutil.copytree(folder, tmp_path / "copy")
    shutil.copytree(analyses, copy / "analysis")
    (path,) = copy.glob(pattern)
    path.write_bytes(path.read_bytes()[:-9] + b"damaged }")
    before = sorted(copy.rglob("*"))
    with pytest.raises(ResultsError) as error:
        qbench("view", copy, "--export", copy / "site")
    (line,) = error.value.lines
    assert line.startswith(f"{path}: damaged")
    assert sorted(copy.rglob("*")) == before


def ask(running, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", running.server.server_port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.headers)


def test_the_server_answers_at_its_own_address_alone(serve, folder):
    running = serve(folder)
    token = running.server.token
    status, page, headers = ask(running, f"/{token}/")
    assert (status, "<title>qbench" in page) == (HTTPStatus.OK, True)
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert running.server.server_address[0] == "127.0.0.1"
    for path in ("/", "/wrong/", "/wrong/data/index.json", f"/{token[:-1]}/"):
        assert ask(running, path)[0] == HTTPStatus.FORBIDDEN
    assert ask(running, f"/{token}/", Host="evil.example:80")[0] == HTTPStatus.FORBIDDEN
    nines = "9" * 5000
    for path in (
        f"data/{nines}/overview.json",
        f"data/0/cell/{nines}.json",
        "../server.py",
        "static/../../data.py",
        "data/../../x",
        "data/7/overview.json",
    ):
        assert ask(running, f"/{token}/{path}")[0] == HTTPStatus.NOT_FOUND
    status, text, _ = ask(running, f"/{token}/data/index.json")
    assert json.loads(text) == {"folders": [{"name": "<b>&grid"}]}


def test_a_record_that_is_written_changes_the_state_of_its_folder(
    serve, folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(data, "compare", lambda _: None)
    running = serve(shutil.copytree(folder, tmp_path / "run"))
    ((before, _),) = running.payload("state")
    next(tmp_path.glob("run/records/*/*/*.json")).touch()
    assert running.payload("state")[0][0] != before


def test_a_comparison_keeps_no_process_that_ends(folder, monkeypatch):
    begun, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(data, "compare", lambda _: begun.set() or ended.wait(60))
    before = {*threading.enumerate()}
    assert not Results(Store(folder)).ready
    assert begun.wait(60)
    assert all(thread.daemon for thread in {*threading.enumerate()} - before)
    ended.set()


def test_two_folders_and_a_site_of_them(folder, tmp_path):
    other = fill(tmp_path / "other", checkpoints=("softmax",)).directory
    results = [Results(Store(one)) for one in (folder, other)]
    paths = write_site(results, tmp_path / "site")
    names = {str(path.relative_to(tmp_path / "site")) for path in paths}
    assert {"index.html", "viewer.js", "data/index.js", "data/1/overview.js",
            "data/1/documents/2/0.js", "data/1/tokens/1/2/3.js"} <= names  # fmt: skip
    for path in paths:
        if path.suffix == ".js" and path.parent.name != "site":
            name, payload = json.loads(f"[{path.read_text().removeprefix('qbenchData(')[:-3]}]")
            assert path.relative_to(tmp_path / "site" / "data").with_suffix("").as_posix() == name
            assert "error" not in payload or name.startswith(("0/cell", "1/cell", "0/doc"))
            assert "<" not in path.read_text()


def test_the_help_is_the_page_of_methods():
    """A section is in the built page: after a change of docs/methods.md it is built again."""
    page = (PAIR.parents[1] / "docs" / "methods.md").read_text()
    script = server_module.asset("viewer.js")
    sections = re.findall(r"^## (.+)\n\n(.+)", page, re.MULTILINE)
    assert len(sections) > 10
    for title, line in sections:
        assert f'title:"{title}"' in script or f'"title":"{title}"' in script, title
        assert line.replace("`", "\\`") in script or line in script, line


def test_a_port_that_is_taken_or_a_folder_without_results_is_said_in_one_line(
    serve, folder, tmp_path
):
    with pytest.raises(ResultsError, match=r"^--port \d+: .*; name another port$"):
        server_module.Server([], port=serve(folder).server.server_port)
    with pytest.raises(ResultsError, match=r"no grid\.json here"):
        qbench("view", folder, tmp_path, "--no-browser")
