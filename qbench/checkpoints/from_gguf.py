"""Make a checkpoint folder of a GGUF file: its weights dequantized to bfloat16, and its tokenizer.

Run as a program of its own, so that who plans a run loads no torch:
``python -m qbench.checkpoints.from_gguf FILE FOLDER``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

from qbench.errors import CheckpointError
from qbench.files import file_digest, kept_digest


def dequantized_folder(file: Path, cache: Path) -> Path:
    """Return the folder in ``cache`` with ``file`` as a transformers checkpoint, made at the first
    call. The weights lie on the file's grid. Raises CheckpointError with transformers' reason."""
    folder = cache / "from-gguf" / kept_digest(file, file_digest)[:16] / file.stem
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
                made = Path(temporary) / "made"
                command = [sys.executable, "-m", "qbench.checkpoints.from_gguf"]
                done = subprocess.run([*command, file, made], capture_output=True, text=True)
                if done.returncode:
                    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
                    raise CheckpointError(
                        f"checkpoint {file}: transformers cannot read this GGUF file: {lines[-1]}"
                    )
                made.rename(folder)
    return folder


def main(file: Path, folder: Path) -> None:
    """Write ``file`` to ``folder``. transformers saves no model that it loaded from GGUF, so the
    weights go into a new one of the same configuration."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16
    )
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
