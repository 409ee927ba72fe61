"""Log a training: JSON Lines, Weights & Biases if it is asked for, and the curves of all runs."""

from __future__ import annotations

import io
import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.attention.normalizers import NORMALIZERS
from qbench.errors import UnavailableError, first_line
from qbench.files import write_atomically

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker


STATE, LOG, CURVES = "state", "log.jsonl", "curves.svg"


class Log:
    """The log of a run, one JSON object per line: ``kind`` (step or watch), ``step``, and
    numbers."""

    def __init__(
        self, path: Path, lines: list[dict[str, Any]], tracker: GeneralTracker | None = None
    ) -> None:
        """Write ``lines``, those so far, to ``path``; new ones are added to both."""
        self.lines = lines
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        self._file = path.open("a", encoding="utf-8")
        self._tracker = tracker

    def write(self, kind: str, step: int, **values: float | int | None) -> None:
        self.lines.append({"kind": kind, "step": step, **values})
        self._file.write(json.dumps(self.lines[-1]) + "\n")
        self._file.flush()
        if self._tracker is not None:
            named = {f"{kind}/{name}": value for name, value in values.items()}
            self._tracker.log(named, step=step)

    def close(self) -> None:
        self._file.close()
        if self._tracker is not None:
            self._tracker.finish()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, without incomplete ones, as a killed process can leave
    its last."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with suppress(ValueError):
            lines.append(json.loads(line))
    return [line for line in lines if isinstance(line, dict) and "step" in line]


def open_wandb(folder: Path, settings: dict[str, Any]) -> GeneralTracker:
    """Start a run of Weights & Biases in the project qbench, named after ``folder``.

    Raises UnavailableError if it does not start, as without a login.
    """
    from accelerate.tracking import WandBTracker

    try:
        tracker = WandBTracker("qbench", name=folder.name, config=settings, resume="allow")
        tracker.start()
    except Exception as error:  # whatever the library raises
        raise UnavailableError(f"--tracker wandb: {first_line(error)}") from error
    return tracker


PANELS = (
    ("step", "loss", "training loss (nats a token)", "linear"),
    ("step", "grad_norm", "gradient norm (largest of the logged steps)", "log"),
    ("watch", "loss", "held-out loss (nats a token)", "linear"),
    ("watch", "sink_rate", "sink rate (mean weight on the first token > 0.3)", "linear"),
    ("watch", "kurtosis", "kurtosis of hidden states", "log"),
    ("watch", "largest", "largest |hidden state|", "log"),
)
STROKES = ("-", "--", "-.", ":")
STYLE = ("tableau-colorblind10", {"svg.hashsalt": "qbench", "font.size": 9})


def draw(out: Path) -> Path | None:
    """Draw the curves of all runs in ``out`` as SVG: one colour and stroke per attention function,
    the same in every figure, one line per seed. Return the file; None if no run has begun."""
    from matplotlib import pyplot

    logs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    seeds: dict[str, list[str]] = {}
    for path in sorted(out.glob(f"*-seed*/{STATE}/{LOG}")):
        normalizer, _, seed = path.parent.parent.name.rpartition("-seed")
        if seed.isdecimal() and (lines := read_log(path)):
            logs[normalizer, seed] = lines
            seeds.setdefault(normalizer, []).append(seed)
    if not logs:
        return None
    pyplot.switch_backend("Agg")
    looks = list(dict.fromkeys((*NORMALIZERS, *seeds)))
    drawn: dict[str, Any] = {}  # a line of each normalizer
    with pyplot.style.context(STYLE):
        figure, axes = pyplot.subplots(2, 3, figsize=(13, 7), layout="constrained")
        for axis, (kind, value, title, scale) in zip(axes.flat, PANELS, strict=True):
            for (normalizer, _), lines in logs.items():
                look = looks.index(normalizer)
                points = {
                    line["step"]: line.get(value)
                    for line in lines
                    if line.get("kind") == kind and (line["step"] > 0 or value != "loss")
                }
                (drawn[normalizer],) = axis.plot(
                    [*points], [*points.values()], linewidth=1.0, marker=".", markersize=3.0,
                    color=f"C{look % 10}", linestyle=STROKES[look % len(STROKES)],
                )  # fmt: skip
            axis.set(title=title, xlabel="step", yscale=scale)
            if value == "sink_rate":
                top = max(0.05, axis.get_ylim()[1])
                axis.set_ylim(bottom=-0.02 * top, top=top)  # a rate of 0 lies beside the frame
            axis.grid(alpha=0.25)
        named = [f"{n}, seed{'s' * (len(of) > 1)} {', '.join(of)}" for n, of in seeds.items()]
        figure.legend(
            [drawn[n] for n in seeds], named, loc="outside lower center", ncols=min(6, len(named))
        )
        payload = io.BytesIO()
        figure.savefig(payload, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    write_atomically(out / CURVES, payload.getvalue())
    return out / CURVES
