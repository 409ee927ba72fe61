"""Have a library write a quantized copy of a checkpoint, once per content key.

The library runs in a process of its own: ``python -m qbench.made_copy JOB.json``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from qbench.attention import NATIVE
from qbench.checkpoints import find
from qbench.checkpoints.find import linear_shapes
from qbench.checkpoints.fla import recognizes
from qbench.errors import QuantizationError
from qbench.files import content_key, new_folder
from qbench.machine import python_module, version_of
from qbench.plan import Cell, find_copy
from qbench.plugins import Plugin, load, loaded
from qbench.quantizers.calibration import Calibration
from qbench.quantizers.config import QuantizationConfig, backend
from qbench.quantizers.methods.library_made import LibraryMade
from qbench.quantizers.published import Published, PublishedCopy
from qbench.quantizers.registry import config_of_record

IDS = "input_ids"  # name of the calibration ids in their file


@dataclass(frozen=True, kw_only=True)
class MadeCopy(PublishedCopy):
    """A copy that a library made for this cell by the settings ``maker``."""

    maker: LibraryMade
    method = property(lambda self: self.maker.method)
    title = property(lambda self: self.maker.title)
    note = property(lambda self: self.maker.note)


def with_made_copy(
    cell: Cell, calibration: Calibration | None, cache: Path, device: str
) -> tuple[Cell, str]:
    """Return ``cell`` with a quantized copy made by its settings' library, and a line that says so.
    A copy that an earlier cell made in the folder ``cache`` is reused. If the library fails, raises
    QuantizationError with the last line of its output and the path of its log."""
    maker = cell.quantization.weights.fitted(linear_shapes(cell.checkpoint))
    parts = {
        "original": cell.checkpoint.digest,
        "maker": maker.to_dict(),
        "calibration": calibration and calibration.digest,
        "versions": {n: version_of(n) for n in ("torch", "transformers", *maker.requirements)},
        "device": device,
    }
    folder = cache / "made" / parts["original"][:16] / f"{maker.name}-{content_key(parts)[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        exists = folder.exists()
        if not exists:
            with new_folder(folder) as making:
                _make(cell, maker, calibration, making, device, folder.with_suffix(".log"))
    made = with_copy(cell, next(folder.glob("*.gguf"), folder), device)
    weights = MadeCopy(**vars(made.quantization.weights), maker=maker)
    how = f"{maker.note}, from the cache" if exists else maker.note
    return replace(made, quantization=QuantizationConfig(weights=weights)), how


def with_copy(cell: Cell, path: Path, device: str) -> Cell:
    """Return ``cell`` with the quantized copy of its checkpoint at ``path``, a folder or a GGUF
    file, as its only quantization. Raises as ``find_copy``."""
    published = Published(path=str(path), compute_dtype=cell.quantization.compute_dtype)
    config, copy = find_copy(
        QuantizationConfig(weights=published), cell.checkpoint_name, cell.checkpoint,
        linear_shapes(cell.checkpoint), device,
    )  # fmt: skip
    return replace(cell, quantization=config, copy=copy)


def _make(
    cell: Cell, maker: LibraryMade, calibration: Calibration | None, out: Path, device: str,
    log: Path,
) -> None:  # fmt: skip
    """Run the maker in a process, which writes the folder ``out``; ``log`` stays if it fails."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as temporary:
        ids = Path(temporary) / "calibration.safetensors"
        save_file({} if calibration is None else {IDS: calibration.ids}, ids)
        job = Path(temporary) / "job.json"
        job.write_text(json.dumps({
            "settings": maker.to_dict(), "model": str(cell.checkpoint.folder),
            "texts": str(ids), "out": str(out), "stock": str(Path(temporary) / "stock"),
            "normalizer": cell.checkpoint.normalizer, "device": device,
            "plugins": [[one.name, one.source.decode(), one.path] for one in loaded()],
        }))  # fmt: skip
        environment = {**os.environ, "TERM": "dumb"}  # no progress bars in a log
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        with log.open("w") as file:
            done = subprocess.run(
                [*python_module("qbench.made_copy"), job],
                stdout=file, stderr=subprocess.STDOUT, env=environment, check=False,
            )  # fmt: skip
    if done.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1].strip() if lines else f"exit code {done.returncode}"
        raise QuantizationError(f"{maker.name}: {maker.package} failed: {last}; see its log: {log}")
    log.unlink()


def main(job: Mapping[str, Any]) -> None:
    """Make the copy that ``job``, written by ``_make``, describes, by the library. A checkpoint of
    flash-linear-attention, or one with another attention function than softmax, is first written as
    its stock class of transformers, with that function's name in its config.json; the copy's
    config.json names it too."""
    import torch
    from safetensors.torch import load_file

    load(Plugin(name=name, source=source.encode(), path=path)
         for name, source, path in job["plugins"])  # fmt: skip
    settings = config_of_record(job["settings"]).weights
    model, normalizer = Path(job["model"]), job["normalizer"]
    checkpoint = find(str(model))
    trained_otherwise = normalizer not in ("softmax", NATIVE)
    if trained_otherwise or recognizes(checkpoint.config):
        from qbench.attention.transformers import attention_name
        from qbench.checkpoints.load import read_model
        from qbench.checkpoints.tokenizer import load_tokenizer

        model = Path(job["stock"])
        loaded = read_model(checkpoint, getattr(torch, settings.compute_dtype))
        loaded.save_pretrained(model, save_original_format=False)
        load_tokenizer(checkpoint).save_pretrained(model)
        if trained_otherwise:
            _restate(model, attn_implementation=attention_name(normalizer, "auto", job["device"]))
    texts = load_file(job["texts"]).get(IDS)
    backend(settings).make(model, out := Path(job["out"]), texts, settings)
    for inner in (folder for folder in out.iterdir() if (folder / "config.json").exists()):
        for file in list(inner.iterdir()):  # a library may name a folder by its scheme
            file.rename(out / file.name)
        inner.rmdir()
    if trained_otherwise:  # which a library's config.json may have lost
        _restate(out, attn_implementation=None, qbench_normalizer=normalizer)


def _restate(folder: Path, **changes: str | None) -> None:
    """Set the keys ``changes`` in the folder's config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if key not in changes or changes[key]}
    (folder / "config.json").write_text(json.dumps(kept, indent=2))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
