"""Train checkpoints that differ in the normalizer alone (``qbench tokenize``, ``qbench train``)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from qbench.checkpoints import Checkpoint
from qbench.checkpoints.find import Shapes
from qbench.cli import run
from qbench.cli.app import show_written
from qbench.cli.options import ClusterOption, DeviceOption, NewFolder
from qbench.errors import RecipeError, UnavailableError
from qbench.files import require_folder
from qbench.machine import choose_device, redirected, terminal
from qbench.plan import plan
from qbench.recipe import Overrides, Recipe
from qbench.records import Training
from qbench.text import group_by_reason
from qbench.training.data import Tokenizing, read_token_files
from qbench.training.data import tokenize as write
from qbench.training.training_recipe import TrainingRecipe

LINE_SECONDS = 10.0  # between two lines of a training, if the output is no terminal


def tokenize(
    sources: Annotated[list[str], typer.Argument(metavar="TEXT...")],
    out: NewFolder,
    tokenizer: Annotated[str | None, typer.Option(metavar="FOLDER_OR_HUB_ID")] = None,
    vocabulary: Annotated[int | None, typer.Option(min=260, max=2**22)] = None,
    bos: bool = True,
    eos: bool = True,
    most_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    decontaminate: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None,
) -> None:
    """Turn text into token files for `qbench train`.

    One document in fifty is held out for measuring, up to 200,000 tokens.

    Examples:
    ```
    qbench tokenize text.jsonl --out tokens --vocabulary 4096
    ```

    Options:
    sources: Text to train on: *.txt (documents separated by a zero byte), *.jsonl or *.parquet with
        the text in the field or column 'text', or hf://datasets/OWNER/NAME@REV:CONFIG (both
        optional).
    out: The folder to write; it must not exist.
    tokenizer: Whose tokenizer to use.
    vocabulary: Instead of --tokenizer: learn one with this many entries from the text (byte-level
        BPE, digits apart).
    bos: Begin each document with BOS.
    eos: End each document with EOS.
    most_tokens: Stop after about this many tokens to train on.
    decontaminate: Leave out lines that share thirteen words in a row with a text of the JSON Lines
        files in this folder, such as those of --data.
    """
    if (tokenizer is None) == (vocabulary is None):
        raise RecipeError(
            "tokenize: add --tokenizer FOLDER_OR_HUB_ID, or --vocabulary N for a new one"
        )
    last = time.monotonic()

    def progress(documents: int, tokens: int) -> None:
        nonlocal last
        if time.monotonic() - last > LINE_SECONDS:
            last = time.monotonic()
            typer.echo(f"{documents:,} documents, {tokens:,} tokens", err=True)

    about = write(
        sources,
        out,
        tokenizer=tokenizer or vocabulary or 0,
        settings=Tokenizing(bos=bos, eos=eos, most_tokens=most_tokens, evaluation=decontaminate),
        progress=progress,
    )
    left_out = f"; {about.left_out_lines:,} lines left out" if decontaminate else ""
    typer.echo(
        f"{about.train.tokens:,} tokens of {about.train.documents:,} documents to train on, "
        f"{about.held_out.tokens:,} tokens of {about.held_out.documents:,} documents held out"
        f"{left_out}"
    )
    show_written([out])


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE")],
    data: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None,
    normalizer: list[str] = [],  # noqa: B006  typer copies it
    seed: list[int] = [],  # noqa: B006
    tokens: Annotated[int | None, typer.Option(min=1)] = None,
    sequences: Annotated[int | None, typer.Option(min=1)] = None,
    out: NewFolder = None,
    device: DeviceOption = "auto",
    gpus: Annotated[str | None, typer.Option(metavar="all|N")] = None,
    stop_after: Annotated[int | None, typer.Option(min=1, metavar="STEPS")] = None,
    tracker: Annotated[Literal["wandb"] | None, typer.Option(metavar="wandb")] = None,
    evaluate: Annotated[Path | None, typer.Option(metavar="RECIPE")] = None,
    cluster: ClusterOption = None,
) -> None:
    """Train the models of a recipe: every seed with every normalizer, alike in all else.

    A training that was stopped, or killed, goes on from its last state when the same command is
    given again, and ends with the same weights as without the stop.
    `torchrun --nproc-per-node 2 -m qbench train RECIPE` spreads each run over several GPUs; for
    several runs at once start a process each, with `--normalizer` and `--seed`.

    Examples:
    ```
    qbench train recipes/train/pair-27m.yaml --data tokens
    ```

    Options:
    recipe: A training recipe, such as recipes/train/pair-27m.yaml.
    data: Token files, instead of the recipe's.
    normalizer: Train this one alone. Repeatable. Default: the recipe's.
    seed: Train with this seed alone. Repeatable.
    tokens: Tokens of each run, instead of the recipe's.
    sequences: Sequences that a device takes at once; fewer need less memory.
    out: Where checkpoints, records and curves go. Default: training/NAME.
    gpus: With --evaluate: GPUs of this host to use. Default: one.
    stop_after: Stop each run after this many steps, this time.
    tracker: Also log to Weights & Biases, if it is installed.
    evaluate: After training, run this recipe on the trained checkpoints instead of its own; results
        go to OUT/evaluation.
    """
    loaded = TrainingRecipe.load(
        recipe,
        normalizers=normalizer,
        seeds=seed,
        tokens=tokens,
        data=data,
        sequences=sequences,
    )
    if tracker and find_spec(tracker) is None:
        raise UnavailableError(f"--tracker {tracker}: {tracker} is not installed")
    folder = out or Path("training") / loaded.name
    require_folder(folder, "--out")
    where = choose_device(device)
    files = read_token_files(Path(loaded.data.tokens))
    planned_runs = loaded.runs()
    trained: dict[str, list[int]] = {}
    for of, run_seed in planned_runs:
        trained.setdefault(of, []).append(run_seed)
    if evaluate is not None:
        evaluated = require_evaluable(evaluate, trained, folder)
        if gpus is not None and (cluster or "local").partition(":")[0] != "local":
            raise RecipeError(f"--cluster {cluster}: its workers are running; leave --gpus out")
    elif cluster is not None or gpus is not None:
        raise RecipeError("--cluster and --gpus: each needs --evaluate RECIPE")
    # torch, once the input is known to be right
    from qbench.training import checkpoint, loop

    if evaluate is not None:
        untrained = loop.untrained(loaded, files)
        require_plannable(evaluated, untrained, device="cuda" if cluster else where)
    name = "train" if len(planned_runs) > 1 else f"train-{loop.run_name(*planned_runs[0])}"
    with (
        loop.joined(where) as processes,
        terminal() as screen,
        redirected(folder / f"{name}{processes.process_index or ''}.log"),
    ):

        def say(line: str) -> None:
            if processes.is_main_process:
                print(line, file=screen)

        trainings = loop.train_recipe(
            loaded,
            files,
            folder,
            processes=processes,
            log=say,
            wandb=bool(tracker),
            stop_after=stop_after,
        )
    if not processes.is_main_process:
        return
    show_trained(trainings, len(planned_runs))
    curves = checkpoint.draw(folder)
    show_written([folder, *([curves] if curves else [])])
    if evaluate is not None and len(trainings) == len(planned_runs):
        checkpoints = {
            of: f"{folder}/{of}-seed{'*' if len(seeds) > 1 else seeds[0]}"
            for of, seeds in trained.items()
        }
        run.run(
            recipe=evaluate, overrides=Overrides(checkpoints=checkpoints),
            out=folder / "evaluation", device=device,
            cluster=cluster, gpus=gpus,
        )  # fmt: skip


def show_trained(trainings: Sequence[Training], planned_runs: int) -> None:
    """Print a line per finished run, and how many of the ``planned_runs`` runs are finished."""
    for record in trainings:
        loss = "not logged" if record.final_loss is None else f"{record.final_loss:.4f}"
        line = (
            f"{record.normalizer}, seed {record.seed}: loss {loss} after {record.tokens:,} tokens"
        )
        if record.watched and record.best_loss is not None:
            line += (
                f"; held out {record.watched[-1].loss:.4f} "
                f"(best {record.best_loss:.4f} at step {record.best_step:,})"
            )
        typer.echo(line)
    if len(trainings) < planned_runs:
        typer.echo(f"{len(trainings)} of {planned_runs} runs are done; the same command continues")


def require_evaluable(recipe: Path, trained: Mapping[str, Sequence[int]], folder: Path) -> Recipe:
    """Return the recipe of ``--evaluate``. Raises RecipeError if it has other checkpoints than
    those ``trained`` into ``folder``: seeds, by normalizer."""
    places = dict.fromkeys(trained, str(recipe.parent))  # of checkpoints that are not there yet
    evaluated = Recipe.load(recipe, Overrides(checkpoints=places))
    if others := [name for name in evaluated.checkpoints if name not in trained]:
        raise RecipeError(
            f"--evaluate {recipe}: checkpoints.{others[0]}: is not trained here "
            f"({', '.join(trained)}); leave it out of the recipe"
        )
    folders = {path.name for name in trained for path in folder.glob(f"{name}-seed*")}
    if more := sorted(
        folders - {f"{name}-seed{seed}" for name in trained for seed in trained[name]}
    ):
        raise RecipeError(
            f"--evaluate {recipe}: {folder} holds {more[0]} too, a seed that this command does not "
            "train; add it, or name another --out"
        )
    return evaluated


def require_plannable(
    recipe: Recipe, untrained: Mapping[str, tuple[Checkpoint, Shapes]], *, device: str
) -> None:
    """Raise QbenchError if the ``recipe`` of ``--evaluate`` cannot be planned for the ``untrained``
    checkpoints: data are missing, or a quantizer does not fit the layers."""
    planned = plan(recipe, device=device, gpu="", show=True, untrained=untrained)
    refused = (
        (cell.name, cell.unsupported_reason) for cell in planned.cells if cell.unsupported_reason
    )
    if lines := group_by_reason(refused):
        raise RecipeError(*(f"--evaluate: {line}" for line in lines))
