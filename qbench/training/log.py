"""What is written while a training runs: JSON Lines, TensorBoard or W&B where asked for; curves."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.attention.normalizers import NORMALIZERS
from qbench.errors import TrainingError
from qbench.files import write_atomically
from qbench.records import TrainingSample

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

# The numbers that a line of each kind must have, beside ``step``.
NUMBERS = {"step": ("loss", "grad_norm"), "watch": tuple(TrainingSample.model_fields)}


class Log:
    """One JSON object a line: ``kind`` (step or watch), ``step``, and its numbers."""

    def __init__(self, path: Path, *, step: int, trackers: list[GeneralTracker]) -> None:
        """Lines after ``step`` are dropped: a resumed training makes them again. A negative one:
        training starts, and so does the log."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_log(path) if line["step"] <= step]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file = path.open("a", encoding="utf-8")
        self._trackers = trackers

    def write(self, kind: str, step: int, **values: float | int | None) -> None:
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        shown = {
            f"{kind}/{name}": value
            for name, value in values.items()
            if value is not None and math.isfinite(value)
        }
        for tracker in self._trackers:
            tracker.log(shown, step=step)

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.finish()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, none where there is none; a last one that a killed process left half is
    dropped. Raises TrainingError for any other that is none of ours."""
    if not path.exists():
        return []
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    found = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            whole = type(line["step"]) is int and all(
                type(line[name]) in (int, float) for name in NUMBERS[line["kind"]]
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            whole = False
        if not whole:
            if number < len(texts):
                raise TrainingError(
                    f"{path}:{number}: damaged; remove that line; only records and curves lack it "
                    "then"
                )
            continue
        found.append(line)
    return found


def open_trackers(
    names: Sequence[str], folder: Path, settings: dict[str, Any]
) -> list[GeneralTracker]:
    """``tensorboard`` writes into ``folder``, ``wandb`` to the project qbench."""
    from accelerate.tracking import TensorBoardTracker, WandBTracker

    made = {
        "tensorboard": lambda: TensorBoardTracker("tensorboard", folder),
        "wandb": lambda: WandBTracker("qbench", name=folder.name, config=settings, resume="allow"),
    }
    trackers = [made[name]() for name in names]
    for tracker in trackers:
        tracker.start()
    return trackers


PANELS = (
    ("step", "loss", "training loss (nats a token)", "linear"),
    ("step", "grad_norm", "gradient norm (largest of the logged steps)", "log"),
    ("watch", "loss", "held-out loss (nats a token)", "linear"),
    ("watch", "sink_rate", "sink rate (mean weight on the first token > 0.3)", "linear"),
    ("watch", "kurtosis", "kurtosis of hidden states", "log"),
    ("watch", "largest", "largest |hidden state|", "log"),
)
FEW = 10  # points of a run
# Okabe and Ito's palette, told apart with any colour vision; strokes tell as well
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STROKES = ("-", "--", "-.", ":")


def plot(logs: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Write the curves of runs by (normalizer, seed) to ``path``, as SVG: one colour and stroke a
    normalizer, the same in every figure, a line a seed. Their numbers stand in the runs' logs."""
    from matplotlib import pyplot

    pyplot.switch_backend("Agg")
    seeds: dict[str, list[str]] = {}
    for normalizer, seed in logs:
        seeds.setdefault(normalizer, []).append(str(seed))
    looks = list(dict.fromkeys((*NORMALIZERS, *seeds)))
    with pyplot.rc_context({"svg.hashsalt": "qbench", "font.size": 9}):
        figure, axes = pyplot.subplots(2, 3, figsize=(13, 7), layout="constrained")
        for axis, (kind, value, title, scale) in zip(axes.flat, PANELS, strict=True):
            for (normalizer, _), lines in logs.items():
                look = looks.index(normalizer)
                points = {
                    line["step"]: line[value]
                    for line in lines
                    if line["kind"] == kind and (line["step"] > 0 or value != "loss")
                }
                axis.plot(
                    [*points], [*points.values()], linewidth=1.0, markersize=3.0,
                    color=COLOURS[look % len(COLOURS)], linestyle=STROKES[look % len(STROKES)],
                    marker="o" if len(points) < FEW else None,  # one point makes no line
                    label=f"{normalizer}, seed{'s' * (len(seeds[normalizer]) > 1)} "
                    + ", ".join(seeds[normalizer]),
                )  # fmt: skip
            axis.set(title=title, xlabel="step", yscale=scale)
            if value == "sink_rate":
                top = max(0.05, axis.get_ylim()[1])
                axis.set_ylim(bottom=-0.02 * top, top=top)  # a rate of 0 lies beside the frame
            axis.grid(alpha=0.25)
        handles, labels = axes.flat[0].get_legend_handles_labels()
        once = dict(zip(labels, handles, strict=True))
        figure.legend(
            once.values(), once.keys(), loc="outside lower center", ncols=min(6, len(once))
        )
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    write_atomically(path, drawn.getvalue())
