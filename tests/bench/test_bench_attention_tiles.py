import re
import time
from concurrent.futures import Future

from typer.testing import CliRunner

from qbench.attention.kernels import tiles
from qbench.bench.attention_tiles import LATE, _passed, _until
from qbench.bench.attention_tiles_table import CURRENT, tiles_table
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
    assert len(seen) == 4  # reciprocals where needed are what is in use


def test_what_is_not_compiled_in_time_is_not_timed():
    found: Future[str] = Future()
    assert _until(time.monotonic() + 0.05, found) == LATE
    found.set_result("2.3e-03")
    assert _until(time.monotonic() - 1, found) == "2.3e-03"
    assert not _passed(LATE)


def test_a_limit_to_compiling_is_for_tiles():
    from qbench.cli.app import app

    ran = CliRunner().invoke(app, ["bench", "attention", "--seconds", "60"])
    assert ran.exit_code != 0
    assert "it is for --tiles" in str(ran.exception) + ran.output
