"""What is written while a training runs: JSON Lines, TensorBoard or W&B where asked for; curves."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
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
    """One JSON object a line: ``kind`` (step or watch), ``step``, and its numbers."""

    def __init__(
        self, path: Path, lines: list[dict[str, Any]], trackers: list[GeneralTracker]
    ) -> None:
        """``lines`` are those so far, which the file begins with; new ones are added to both."""
        self.lines = lines
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        self._file = path.open("a", encoding="utf-8")
        self._trackers = trackers

    def write(self, kind: str, step: int, **values: float | int | None) -> None:
        self.lines.append({"kind": kind, "step": step, **values})
        self._file.write(json.dumps(self.lines[-1]) + "\n")
        self._file.flush()
        for tracker in self._trackers:
            tracker.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.finish()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log but those that are not whole, as a killed process leaves its last."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with suppress(ValueError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict) and "step" in line]


def open_trackers(
    names: Sequence[str], folder: Path, settings: dict[str, Any]
) -> list[GeneralTracker]:
    """``tensorboard`` writes into ``folder``, ``wandb`` to the project qbench.

    Raises UnavailableError for one that does not start, as W&B without a login.
    """
    from accelerate.tracking import TensorBoardTracker, WandBTracker

    made = {
        "tensorboard": lambda: TensorBoardTracker("tensorboard", folder),
        "wandb": lambda: WandBTracker("qbench", name=folder.name, config=settings, resume="allow"),
    }
    trackers = []
    for name in names:
        try:
            trackers.append(made[name]())
            trackers[-1].start()
        except Exception as error:  # whatever a library of its own says
            raise UnavailableError(f"--tracker {name}: {first_line(error)}") from error
    return trackers


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
    """Write the curves of all runs that have begun in ``out``, as SVG: one colour and stroke a
    normalizer, the same in every figure, a line a seed. Their numbers stand in the runs' logs.
    Returns the file; None where no run has begun."""
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
