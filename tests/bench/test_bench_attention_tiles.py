import re
import time
from concurrent.futures import Future

import pytest
from typer.testing import CliRunner

from qbench.attention.kernels import gluon_backward, tiles
from qbench.bench.attention_tiles import LATE, _passed, _until
from qbench.bench.attention_tiles_table import CURRENT, tiles_table
from qbench.bench.attention_tried import TRIED, checked, passed
from qbench.bench.attention_variants import VARIANTS

FORWARD = [
    {"width": 64, "kernel": "sigmoid", "tile": tile, "rate": rate, "error": error,
     "beside": rate and rate / 440}
    for tile, rate, error in [
        ("a", 484.0, "2e-03"), ("b", 462.0, "2e-03"), ("c", 440.0, "2e-03"),
        (CURRENT, 396.0, "2e-03"), ("d", None, "0.5"),
    ]
]  # fmt: skip
RESULTS = {
    "forward": FORWARD,
    "backward": [
        {"shape": (8, 1024, 16, 64), "kernel": "sigmoid", "error": "3e-03", "Gluon": 200.0,
         "Triton": 180.0, "beside": 0.98},
    ],
    "steps": [{"shape": (8, 1024, 16, 64), "kernel": "cuDNN softmax", "ms": 0.4}],
}  # fmt: skip


def test_the_best_tiles_the_one_in_use_and_what_went_wrong_are_shown():
    lines = [re.sub(" +", " ", line) for line in tiles_table(RESULTS, best=2).splitlines()]
    assert [line for line in lines if line.startswith("| 64 |")] == [
        "| 64 | sigmoid | a | 484 | 1.10 | 2e-03 |",
        "| 64 | sigmoid | b | 462 | 1.05 | 2e-03 |",
        "| 64 | sigmoid | as it is | 396 | 0.90 | 2e-03 |",
        "| 64 | sigmoid | d | – | – | 0.5 |",
    ]
    assert "| 8, 1024, 16, 64 | sigmoid | 200 | 0.98 | 180 | 3e-03 |" in lines
    assert "| 8, 1024, 16, 64 | cuDNN softmax | 0.400 | 1.00 | – | – |" in lines


def test_a_variant_changes_the_arithmetic_only_while_it_is_tried():
    def constants():
        return dict(tiles.RECIPROCALS), set(tiles.POLYNOMIALS)

    before, seen = constants(), []
    for variant in VARIANTS:
        with variant.chosen():
            seen += [now for now in [constants()] if now not in seen]
        assert constants() == before
    assert len(seen) == 5


def test_what_is_not_compiled_in_time_is_not_timed():
    found: Future[str] = Future()
    assert _until(time.monotonic() + 0.05, found) == LATE
    found.set_result("2.3e-03")
    assert _until(time.monotonic() - 1, found) == "2.3e-03"
    assert not _passed(LATE)


def test_a_limit_to_compiling_is_for_tiles():
    from qbench.cli import app

    ran = CliRunner().invoke(app, ["bench", "attention", "--seconds", "60"])
    assert ran.exit_code != 0
    assert "it is for --tiles" in str(ran.exception) + ran.output


def tried(kernel, rate, error):
    return {"shape": (8, 1024, 16, 64), "kernel": kernel, "in use": rate and 300.0, "tried": rate,
            "beside": rate and 1.04, "error": error}  # fmt: skip


def test_kernels_that_are_tried_stand_beside_those_in_use_and_refused_ones_are_named():
    rows = [tried("a", 330.0, "2e-03"), tried("b", None, "other bits in 2 of 9 runs")]
    text = re.sub(" +", " ", tiles_table(RESULTS | {"tried": rows}))
    assert "| 8, 1024, 16, 64 | a | 330 | 300 | 1.04 | 2e-03 |" in text
    assert "| 8, 1024, 16, 64 | b | – | – | – | other bits in 2 of 9 runs |" in text
    assert "Refused: b (D = 64).\n" in text


@pytest.mark.parametrize("tried", TRIED, ids=lambda tried: f"{tried} {tried.width}")
def test_what_is_tried_is_in_use_only_meanwhile(tried):
    def tables():
        return dict(tiles.LASTING), dict(gluon_backward.AHEAD), gluon_backward.ENOUGH

    before = tables()
    with tried.used():
        lasting, ahead, _ = tables()
    assert list(lasting) == ([] if tried.backward else [tried.width])
    assert bool(ahead) == tried.backward
    assert tables() == before


def test_a_check_that_fails_is_a_finding_and_one_that_hangs_is_ended(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = checked(TRIED[:1], 60)[TRIED[0]]
    assert not passed(found)
    assert "Error" in found
    assert checked(TRIED[:1], 0.0) == {TRIED[0]: "it took too long, or hangs"}
    assert passed("2.3e-03")
