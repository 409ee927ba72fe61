"""Choose the settings of each layer under a budget of bits (``qbench budget``)."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from qbench.budget.choose import expand
from qbench.cli.app import show_written
from qbench.cli.options import DeviceOption, Out, RecipeOrOptions
from qbench.cli.run import load_launcher, run
from qbench.errors import RecipeError, shown
from qbench.files import cache_folder, require_folder
from qbench.machine import free, redirected, terminal
from qbench.plan import Plan, find_calibration, plan
from qbench.quantizers.config import UNQUANTIZED
from qbench.quantizers.registry import config_of, split_commas
from qbench.recipe import Overrides, Recipe, absolute, label_of, save
from qbench.runner.progress import Display
from qbench.store import require_no_links


def budget(
    *,
    recipe: RecipeOrOptions = None,
    overrides: Annotated[
        Overrides, "checkpoints", "quantized", "tasks", "data", "definitions", "calibration",
        "calibration_samples", "calibration_length", "limit", "dtype",
    ],
    bits: Annotated[str | None, typer.Option(metavar="BITS,…")] = None,
    gib: Annotated[str | None, typer.Option(metavar="GIB,…")] = None,
    methods: Annotated[str, typer.Option(metavar="NAMES")] = "hqq,gptq,rtn",
    include: Annotated[str | None, typer.Option(metavar="NAMES")] = None,
    peers: Annotated[str | None, typer.Option(metavar="NAMES")] = None,
    texts: Annotated[int, typer.Option(min=1, metavar="N")] = 16,
    length: Annotated[int, typer.Option(min=8, metavar="TOKENS")] = 512,
    out: Out = None,
    device: DeviceOption = "auto",
) -> None:  # fmt: skip
    """Choose each layer's method and width under a budget of bits, and test whether that mix is
    better than the best uniform column of at most the same size.

    Each layer is quantized alone by each method and width, and the model's KL divergence is
    measured on calibration text. The choice with the smallest sum is solved exactly, written to
    OUT/recipe.yaml as a column that can be edited, and run on the tasks beside the uniform column.
    Finished costs are kept, so a search that was stopped goes on. Exit code 1 if a cell failed, 2
    for input that cannot work.

    Examples:
    qbench budget --checkpoint m=DIR --bits 3.5 --tasks piqa,wikitext --data DIR --out results/mix
    qbench budget --checkpoint m=DIR --gib 4 --methods gptq,hqq --tasks piqa --out results/mix

    Options:
    bits: Budgets in bits per weight, as tables count them: scales and zeros too, embeddings and LM
        head left out.
    gib: Budgets in GiB of all weights.
    methods: Methods that quantize weights here, each with all of its widths; or single ones, such
        as gptq-4bit:group_size=32.
    include: lm_head, embeddings, or both: quantize them too, by rtn or hqq, and count them in
        --bits. If they share one matrix, either name means both.
    peers: Further quantizers to compare the mixes with by the same test, of any size; copies that
        are quantized already are named by --quantized.
    texts: Windows of the calibration text that costs are measured on; the others calibrate.
    length: Tokens of each of these windows, at most those of --calibration-length.
    """
    budgets = {
        f"mix-{item}{suffix}": (_number(option, item), option.removeprefix("--"))
        for option, text, suffix in (("--bits", bits, ""), ("--gib", gib, "gib"))
        for item in split_commas(text or "")
    }
    if not budgets:
        raise RecipeError("name a budget: --bits 3.5, or --gib 4")
    included = split_commas(include or "")
    if unknown := set(included) - {"lm_head", "embeddings"}:
        raise RecipeError(
            f"--include {', '.join(sorted(unknown))}: unknown; possible: lm_head, embeddings"
        )
    choices, further = expand(split_commas(methods)), split_commas(peers or "")
    for peer in further:
        config_of(peer)  # raises for an unknown one
    copies = [
        {"name": "checkpoint", "path": absolute(Path.cwd(), source, hub=True), "label": label}
        for label, source in overrides.quantized.items()
    ]
    overrides = overrides.model_copy(update={"quantizers": tuple(choices), "quantized": {}})
    launcher = load_launcher(recipe, overrides, out=out, device=device)
    folder, checkpoints = launcher.out, launcher.recipe.checkpoints
    if len(checkpoints) > 1:
        raise RecipeError(
            f"a budget is for one model, not for {', '.join(checkpoints)}: give --checkpoint "
            "NAME=DIR, --tasks and --calibration without a recipe"
        )
    source = find_calibration(launcher.recipe, needed=True)
    if source is None:
        raise RecipeError(
            "calibration is missing: costs are measured on its text; add --calibration FILE"
        )
    if source.samples <= texts:
        raise RecipeError(
            f"--texts {texts}: must be fewer than the {source.samples} windows of the calibration "
            "text, since the rest calibrates; lower it, or raise --calibration-samples"
        )
    require_folder(folder, "--out")
    require_no_links(folder)
    require_folder(cache_folder(), "$QBENCH_CACHE")
    unquantized = UNQUANTIZED[launcher.recipe.quantizers[0].quantization.compute_dtype]
    changed = overrides.model_copy(
        update={"quantizers": (unquantized,), "calibration_samples": source.samples - texts}
    )

    def planned(path: Path, entries: Sequence[Any]) -> Plan:
        """Write the recipe with the quantizers ``entries``; return its plan."""
        save(recipe, changed, path, command="qbench budget", quantizers=[unquantized, *entries])
        return plan(Recipe.load(path), device=launcher.device)

    from qbench.budget.search import report, search  # scipy and figures

    with (
        tempfile.TemporaryDirectory() as scratch,
        terminal() as screen,
        redirected(Path(os.devnull)),
        Display(screen, 1) as display,
    ):
        results, entries = search(
            partial(planned, Path(scratch) / "recipe.yaml"), choices, [*further, *copies], budgets,
            source=source, windows=texts, length=min(length, source.length), include=included,
            cache=cache_folder(), progress=display,
        )  # fmt: skip
    free(launcher.device)  # cells run in processes of their own
    labels = {entry["label"] for entry in entries}  # a peer may be the uniform column
    entries += [peer for peer in further if label_of(peer) not in labels]
    path = folder / "recipe.yaml"
    planned(path, [*entries, *copies])
    show_written([path])
    ended = 0
    try:
        run(recipe=path, overrides=Overrides(), out=folder, device=device)
    except typer.Exit as exit:
        ended = exit.exit_code
    compared = [*map(label_of, further), *(copy["label"] for copy in copies)]
    lines, paths = report(folder, results, compared)
    for line in lines:
        typer.echo(line)
    show_written(paths)
    raise typer.Exit(ended)


def _number(option: str, text: str) -> float:
    """Return the number in ``text``. Raises RecipeError for one that is not positive."""
    with suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise RecipeError(f"{option} {shown(text)}: write numbers above 0, such as 2.75,3.5")
