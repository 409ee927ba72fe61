"""Train checkpoints that differ only in the normalizer (``qbench tokenize``, ``qbench train``)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from qbench.cli.app import show_written
from qbench.cli.options import DeviceOption, NewFolder
from qbench.errors import RecipeError
from qbench.files import require_folder
from qbench.machine import choose_device, redirected, terminal
from qbench.records import Training
from qbench.training.data import read_token_files
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
    qbench tokenize text.jsonl --out tokens --vocabulary 4096

    Options:
    sources: Text to train on: *.txt (documents separated by a zero byte), *.jsonl or *.parquet with
        the text in the field or column 'text', or hf://datasets/OWNER/NAME@REV:CONFIG (both
        optional).
    out: The folder to write; it must not exist.
    tokenizer: Folder or hub id of the tokenizer to use.
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
            "tokenize: give either --tokenizer FOLDER_OR_HUB_ID, or --vocabulary N for a new one"
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
        bos=bos,
        eos=eos,
        most_tokens=most_tokens,
        decontaminate=decontaminate,
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
    stop_after: Annotated[int | None, typer.Option(min=1, metavar="STEPS")] = None,
) -> None:
    """Train the models of a recipe: every seed with every normalizer, all else equal.

    A training that was stopped, or killed, goes on from its last state when the same command is
    given again, and ends with the same weights as without the stop.
    `torchrun --nproc-per-node 2 -m qbench train RECIPE` spreads each run over several GPUs; for
    several runs at once start a process each, with `--normalizer` and `--seed`.

    Examples:
    qbench train recipes/train/pair-27m.yaml --data tokens

    Options:
    recipe: A training recipe, such as recipes/train/pair-27m.yaml.
    data: Token files, instead of the recipe's.
    normalizer: Train only this one. Repeatable. Default: the recipe's.
    seed: Train only with this seed. Repeatable. Default: the recipe's.
    tokens: Tokens of each run, instead of the recipe's.
    sequences: Sequences that a device takes at once; fewer need less memory.
    out: Where checkpoints and records go. Default: training/NAME, NAME being the recipe's name.
    stop_after: Stop each run after this many further steps, counted from where it resumes.
    """
    loaded = TrainingRecipe.load(
        recipe, normalizers=normalizer, seeds=seed, tokens=tokens, data=data, sequences=sequences
    )
    folder = out or Path("training") / loaded.name
    require_folder(folder, "--out")
    where = choose_device(device)
    files = read_token_files(Path(loaded.data.tokens))
    planned_runs = loaded.runs()
    # torch, once the input is known to be right
    from qbench.training import loop

    name = "train" if len(planned_runs) > 1 else f"train-{loop.run_name(*planned_runs[0])}"
    with (
        loop.joined(where) as processes,
        terminal() as screen,
        redirected(folder / f"{name}{processes.process_index or ''}.log"),
    ):

        def say(line: str) -> None:
            """Print a line, in the first process of a training only."""
            if processes.is_main_process:
                print(line, file=screen)

        trainings = loop.train_recipe(
            loaded, files, folder, processes=processes, log=say, stop_after=stop_after
        )
    if not processes.is_main_process:
        return
    show_trained(trainings, len(planned_runs))
    show_written([folder])


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
        typer.echo(
            f"{len(trainings)} of {planned_runs} runs are done; run the same command to continue"
        )
