"""What the hub of the tests holds: the published pair's ids with a tiny model each, the five
tasks' data sets under their ids and in their files' layout, and a shard of calibration text."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from checkpoints.folders import shapes
from hub.server import Hub
from safetensors.torch import save

DEMO = Path(__file__).parents[2] / "recipes" / "demo"
SOFTMAX = "zaydzuhri/vanilla-340M-4096-model"
SOFTPICK = "zaydzuhri/softpick-340M-4096-model"
C4 = "allenai/c4"
SHARD = "en/c4-train.00000-of-01024.json.gz"
DOCUMENTS = 6  # of each split


Files = dict[tuple[str, str], dict[str, bytes]]  # by kind and id of the repository


def files() -> Files:
    """Everything that recipes/gptq.yaml and appendix-340m.yaml ask for."""
    models = {SOFTMAX: "parallel_attn", SOFTPICK: "parallel_softpick_attn"}
    found: Files = {
        ("models", name): checkpoint(attention, seed)
        for seed, (name, attention) in enumerate(models.items())
    }
    return found | {("datasets", name): content for name, content in _data_sets().items()}


def fill(hub: Hub, content: Files) -> None:
    """Put ``content`` on ``hub``, as the only commit of each repository."""
    for (kind, name), of_it in content.items():
        (hub.model if kind == "models" else hub.dataset)(name).commit(of_it)


def checkpoint(attention: str, seed: int) -> dict[str, bytes]:
    """Files of a tiny model with random weights and the demo's tokenizer, in two shards."""
    config = json.loads((DEMO / "softpick" / "config.json").read_text())
    config |= {"attn_impl": attention, "hidden_size": 128, "num_heads": 1, "num_hidden_layers": 1,
               "intermediate_size": 128, "max_position_embeddings": 4096}  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes(config).items():
        tensors[name] = (torch.randn(shape, generator=generator) / 11).bfloat16()
    last = [name for name in tensors if "layers" not in name]
    first = [name for name in tensors if "layers" in name]
    of_it = {
        f"model-0000{i}-of-00002.safetensors": save({name: tensors[name] for name in names})
        for i, names in ((1, first), (2, last))
    }
    index = dict.fromkeys(first, "model-00001-of-00002.safetensors")
    index |= dict.fromkeys(last, "model-00002-of-00002.safetensors")
    of_it["model.safetensors.index.json"] = json.dumps(
        {"metadata": {}, "weight_map": index}
    ).encode()
    of_it["config.json"] = json.dumps(config).encode()
    of_it["generation_config.json"] = b'{"bos_token_id": 1, "eos_token_id": 2}'
    for name in ("tokenizer.json", "tokenizer_config.json"):
        of_it[name] = (DEMO / "softpick" / name).read_bytes()
    of_it["README.md"] = b"not asked for"
    of_it["optimizer.pt"] = b"not asked for"
    return of_it


def texts(length: int, number: int) -> list[str]:
    """``number`` texts of the demo's language, of about ``length`` characters each."""
    lines = (DEMO / "calibration.jsonl").read_text().splitlines()
    whole = " ".join(json.loads(line)["text"] for line in lines)
    starts = [(i * 7919) % max(1, len(whole) - 1000) for i in range(number)]
    return [(whole[start:] + whole * (1 + length // len(whole)))[:length] for start in starts]


def _data_sets() -> dict[str, dict[str, bytes]]:
    words = [text.split() for text in texts(600, DOCUMENTS)]
    part = {i: [" ".join(w[i * 8 : i * 8 + 8]) for w in words] for i in range(6)}
    options = [{"text": [part[i][n] for i in range(1, 5)], "label": list("ABCD")}
               for n in range(DOCUMENTS)]  # fmt: skip
    arc = {"id": [f"q{n}" for n in range(DOCUMENTS)], "question": part[0], "choices": options,
           "answerKey": [list("ABCD")[n % 4] for n in range(DOCUMENTS)]}  # fmt: skip
    piqa = {"goal": part[0], "sol1": part[1], "sol2": part[2],
            "label": [n % 2 for n in range(DOCUMENTS)]}  # fmt: skip
    sciq = {"question": part[0], "distractor1": part[1], "distractor2": part[2],
            "distractor3": part[3], "correct_answer": part[4], "support": part[5]}  # fmt: skip
    three = ("train", "validation", "test")
    return {
        "allenai/ai2_arc": _parquet(
            arc, {split: f"ARC-Easy/{split}-00000-of-00001.parquet" for split in three}, "ARC-Easy"
        ),
        "EleutherAI/lambada_openai": _lines(
            {"text": [" ".join(w[:40]) for w in words]}, {"test": "data/lambada_test.jsonl"}
        ),
        "baber/piqa": _parquet(
            piqa, {split: f"data/{split}-00000-of-00001.parquet" for split in three[:2]}
        ),
        "allenai/sciq": _parquet(
            sciq, {split: f"data/{split}-00000-of-00001.parquet" for split in three}
        ),
        "EleutherAI/wikitext_document_level": _parquet(
            {"page": [" ".join(w) for w in words]},
            {split: f"wikitext-2-raw-v1/{split}-00000-of-00001.parquet" for split in three},
            "wikitext-2-raw-v1",
        ),
        C4: {SHARD: _shard()},
    }


def _parquet(
    columns: dict[str, list[Any]], splits: dict[str, str], config: str = "default"
) -> dict[str, bytes]:
    target = io.BytesIO()
    pq.write_table(pa.table(columns), target)
    return _card(splits, config) | dict.fromkeys(splits.values(), target.getvalue())


def _lines(columns: dict[str, list[str]], splits: dict[str, str]) -> dict[str, bytes]:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return _card(splits, "default") | dict.fromkeys(splits.values(), content)


def _card(splits: dict[str, str], config: str) -> dict[str, bytes]:
    files = [f"  - split: {split}\n    path: {path}\n" for split, path in splits.items()]
    card = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{''.join(files)}---\n"
    return {"README.md": card.encode()}


def _shard() -> bytes:
    """128 documents of 2,048 tokens and more, as the recipe asks for, and some shorter ones."""
    documents = [*texts(600, 4), *texts(11_000, 130)]
    lines = "".join(
        json.dumps({"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "x"}) + "\n"
        for text in documents
    )
    return gzip.compress(lines.encode(), mtime=0)
