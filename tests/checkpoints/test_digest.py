"""The digest is of everything that loading a model and its tokenizer reads."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from checkpoints.folders import CONFIG, write
from loading import load_model

from qbench.checkpoints import find
from qbench.checkpoints.find import files_read, weight_files
from qbench.errors import CheckpointError

READ = [
    "generation_config.json", "tokenizer.json", "chat_template.jinja",
    "additional_chat_templates/tools.jinja", "vocab.txt", "spiece.model",
]  # fmt: skip
NOT_READ = ["README.md", "training.json", "optimizer.pt"]


def digest_with(folder: Path, name: str, content: str) -> str:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content)
    return find(str(folder)).digest


@pytest.mark.parametrize("name", READ)
def test_what_is_read_changes_the_digest(tmp_path, name):
    folder = write(tmp_path / "c")
    digests = [find(str(folder)).digest, *(digest_with(folder, name, t) for t in ("{}", '{"a":1}'))]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("name", NOT_READ)
def test_what_is_not_read_leaves_the_digest(tmp_path, name):
    folder = write(tmp_path / "c")
    assert find(str(folder)).digest == digest_with(folder, name, "{}")


def test_the_digest_is_of_weights_and_configuration(tmp_path):
    first = find(str(write(tmp_path / "a"))).digest
    assert find(str(write(tmp_path / "b"))).digest == first
    assert find(str(write(tmp_path / "c", {**CONFIG, "rope_theta": 5e5}))).digest != first


def test_large_files_are_hashed_in_parts(tmp_path, monkeypatch):
    folder = str(write(tmp_path / "c"))
    whole = find(folder).digest
    monkeypatch.setattr(sys.modules["qbench.checkpoints.find"], "LARGE", 0)
    assert find(folder).digest == find(folder).digest != whole


def test_files_that_every_tokenizer_of_transformers_names_are_read(tmp_path):
    import transformers

    folder = write(tmp_path / "c")
    models = Path(transformers.__file__).parent / "models"
    named = {
        name
        for path in models.glob("*/tokenization_*.py")
        for table in re.findall(r"VOCAB_FILES_NAMES = \{([^}]*)\}", path.read_text())
        for name in re.findall(r':\s*"([^"]+)"', table)
    }
    assert len(named) > 10, "the tables of vocabulary files are not where they were"
    for name in named:
        (folder / name).write_text("{}")
    assert named <= {name for name, *_ in files_read(folder, weight_files(folder))}


def test_generation_settings_of_the_folder_reach_the_model(tmp_path):
    import torch

    folder = write(tmp_path / "c")
    (folder / "generation_config.json").write_text('{"repetition_penalty": 1.7}')
    model = load_model(find(str(folder)), dtype=torch.float32, device="cpu")
    assert model.generation_config.repetition_penalty == 1.7


def test_generation_settings_that_transformers_refuses_are_one_line(tmp_path):
    import torch

    folder = write(tmp_path / "c")
    (folder / "generation_config.json").write_text('{"early_stopping": 3.5}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: .*early_stop") as error:
        load_model(find(str(folder)), dtype=torch.float32, device="cpu")
    assert len(str(error.value).splitlines()) == 1


def test_a_cache_of_links_is_read_like_a_folder(tmp_path):
    folder = write(tmp_path / "c")
    blobs = tmp_path / "blobs"
    shutil.move(folder, blobs)
    folder.mkdir()
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(path)
    assert find(str(folder)).digest == find(str(blobs)).digest
