"""Quantized weights on disk, by content key, so that nothing is quantized twice.

    ROOT/<digest of the original, 16 digits>/<config>-<key, 16 digits>/
        weights.safetensors     tensors, named as ``quantize.make`` says
        manifest.json           key, its parts, and the file's size and digest

A folder appears in one step, whole. A damaged one is noticed by digest and made again.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from qbench.code import QUANTIZING, code_digest
from qbench.errors import OutputError, first_line
from qbench.files import clean_temporaries, content_key, digest_of_parts, mark_used, new_folder
from qbench.machine import version_of
from qbench.quantizers.calibration import Calibration
from qbench.quantizers.config import QuantizationConfig

WEIGHTS, MANIFEST = "weights.safetensors", "manifest.json"
DIGITS = 16


class Damaged(Exception):
    """An artifact on disk is not what its manifest says."""


class Artifact:
    """Where the weights of one checkpoint under one config lie."""

    def __init__(
        self,
        root: Path,
        *,
        original: str,
        config: QuantizationConfig,
        calibration: Calibration | None,
        attention: str,
        normalizer_source: str | None,
        device: torch.device,
    ) -> None:
        """``original`` is the digest of the unquantized weights, ``attention`` the name of what
        runs while calibrating, ``normalizer_source`` a digest of the plug-in that its normalizer
        stands in, if it does; they play no part without ``calibration``."""
        libraries = ("torch", "transformers", "triton", *config.requirements)
        self.parts = {  # all that can change the tensors
            "original": original,
            "quantizer": config.to_dict(),
            "calibration": calibration
            and {
                "digest": calibration.digest,
                "attention": attention,
                **({"normalizer source": normalizer_source} if normalizer_source else {}),
            },
            "versions": {name: version_of(name) for name in libraries},
            "code": code_digest(QUANTIZING),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        }
        self.key = content_key(self.parts)
        self.folder = Path(root) / original[:DIGITS] / f"{config.name}-{self.key[:DIGITS]}"

    def lock(self) -> FileLock:
        """Held while it is read or made, by one process at a time."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(self.folder.with_name(f".{self.folder.name}.lock"))

    def read(self, device: torch.device) -> tuple[dict[str, Tensor], str] | None:
        """Tensors by name, and the note they were written with; None where there is nothing.

        Raises Damaged where a file is missing, unreadable or not of the digest in the manifest.
        """
        if not self.folder.exists():
            return None
        try:
            manifest = json.loads((self.folder / MANIFEST).read_bytes())
            wanted, note = manifest["files"][WEIGHTS]["digest"], manifest["note"]
            if manifest["key"] != self.key:
                raise Damaged(f"{MANIFEST}: another key")
            # Read once and checked: a mapped file could change, or end, under a running model.
            payload = (self.folder / WEIGHTS).read_bytes()
            if digest_of_parts(payload) != wanted:
                raise Damaged(f"{WEIGHTS}: digest differs")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{type(error).__name__}: {error}") from None
        mark_used(self.folder)
        return {name: tensor.to(device) for name, tensor in load(payload).items()}, note

    def write(self, tensors: dict[str, Tensor], note: str) -> None:
        """Replace what is there, if anything, in one step.

        Not forced to the disk, which takes longer than quantizing: what a crash of the host leaves
        is noticed by its digest. Raises OutputError where it cannot be written.
        """
        clean_temporaries(self.folder.parent.parent)  # a killed process may have left GiBs
        parts = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        try:
            with new_folder(self.folder) as making:
                path = making / WEIGHTS
                save_file(parts, path)
                file = {"digest": digest_of_parts(path), "bytes": path.stat().st_size}
                manifest = {
                    "key": self.key,
                    "parts": self.parts,
                    "note": note,
                    "files": {WEIGHTS: file},
                }
                text = json.dumps(manifest, indent=1, sort_keys=True)
                (making / MANIFEST).write_text(f"{text}\n")
                shutil.rmtree(self.folder, ignore_errors=True)
        except (OutputError, SafetensorError) as error:
            raise OutputError(
                f"{self.folder}: quantized weights cannot be kept ({first_line(error)}); make "
                "room, or set QBENCH_CACHE to another folder"
            ) from None
