"""Store quantized weights on disk by content key, so that nothing is quantized twice.

    ROOT/<digest of the original, 16 digits>/<config>-<key, 16 digits>/
        weights.safetensors     tensors, named as ``quantize.make`` says
        manifest.json           key, its parts, and the file's size and digest

A folder is written to a temporary name and renamed once it is complete. A damaged one is detected
by its digest and written again.
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

from qbench.errors import OutputError, first_line
from qbench.files import (
    QUANTIZING,
    clean_temporaries,
    code_digest,
    content_key,
    digest_of_parts,
    mark_used,
    new_folder,
)
from qbench.machine import version_of
from qbench.quantizers.calibration import Calibration
from qbench.quantizers.config import QuantizationConfig

WEIGHTS, MANIFEST = "weights.safetensors", "manifest.json"
DIGITS = 16


class Damaged(Exception):
    """Raised if an artifact on disk does not fit its manifest."""


class Artifact:
    """Reads and writes the stored tensors of one checkpoint under one config."""

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
        """``original``: digest of the unquantized weights. ``attention``: name of the attention
        function that runs while calibrating. ``normalizer_source``: digest of the plug-in that
        defines its normalizer, if one does. The last two count only with ``calibration``."""
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
        """Return the lock that a process holds while it reads or writes the artifact."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(self.folder.with_name(f".{self.folder.name}.lock"))

    def read(self, device: torch.device) -> tuple[dict[str, Tensor], str] | None:
        """Return the tensors by name and their note; None if there is no artifact.

        Raises Damaged if a file is missing, unreadable or does not have its digest.
        """
        if not self.folder.exists():
            return None
        try:
            manifest = json.loads((self.folder / MANIFEST).read_bytes())
            expected, note = manifest["files"][WEIGHTS]["digest"], manifest["note"]
            if manifest["key"] != self.key:
                raise Damaged(f"{MANIFEST}: another key")
            # Read once and checked: a mapped file could change, or end, under a running model.
            payload = (self.folder / WEIGHTS).read_bytes()
            if digest_of_parts(payload) != expected:
                raise Damaged(f"{WEIGHTS}: digest differs")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{type(error).__name__}: {error}") from None
        mark_used(self.folder)
        return {name: tensor.to(device) for name, tensor in load(payload).items()}, note

    def write(self, tensors: dict[str, Tensor], note: str) -> None:
        """Write the tensors, replacing an earlier artifact in one step.

        The files are not synced to the disk, which takes longer than quantizing; files that a crash
        of the host damages are detected by their digest. Raises OutputError if they cannot be
        written.
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
