"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class ScoringMode(StrEnum):
    auto = "auto"
    exact = "exact"
    fast = "fast"
    lm_eval = "lm-eval"


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"


RecipeFile = Annotated[Path, typer.Argument(help="A recipe, such as recipes/gptq.yaml.")]
Folder = Annotated[Path, typer.Argument(help="A results folder that `qbench run` wrote.")]
Checkpoints = Annotated[
    list[str],
    typer.Option(
        "--checkpoint",
        metavar="NAME=PATH_OR_HUB_ID",
        help="Use this folder or hub id for the recipe's checkpoint NAME. Repeatable.",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder of TASK/SPLIT.jsonl files: score from these, without the hub."),
]
Calibration = Annotated[
    Path | None,
    typer.Option(help="JSON Lines file with a text field: what calibrated quantizers see."),
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Score the first N documents of each task only.")
]
Only = Annotated[
    str | None,
    typer.Option(metavar="PATTERN", help="Only cells like this glob: 'softpick/gptq-*'."),
]
Out = Annotated[
    Path | None, typer.Option(help="Results folder. Default: results/NAME of the recipe.")
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        help="Compute in this dtype instead of the recipe's, unquantized cells too. Most CPUs are "
        "ten times slower in bfloat16.",
    ),
]
ScoringOption = Annotated[
    ScoringMode | None,
    typer.Option(
        help="Score in this mode instead of the recipe's: exact gives HFLM's scores, fast packs "
        "requests, lm-eval is HFLM itself; auto is fast on a GPU, exact on a CPU.",
    ),
]
DeviceOption = Annotated[Device, typer.Option(help="Where to compute.")]
Published = Annotated[
    str | None,
    typer.Option(metavar="SET", help="Print a paper's numbers beside ours: softpick-340m."),
]
