"""Make the demo again: its text, its tasks' data, its tokenizer and its two checkpoints.

    python recipes/demo/make.py --seed 0 --device cuda

The data files come out byte for byte the same on every machine and Python version. So does the
tokenizer with the same version of ``tokenizers``. The weights come out bit for bit the same on
the same machine, device type and torch version; elsewhere floating-point sums are ordered
differently, and the pair is equal only in quality. The bundled pair was made with the command
and on the device that ``softmax/training.json`` and ``softpick/training.json`` name.

Training takes about three minutes a model on a data-centre GPU, and most of a day on two CPU
cores. The two models do not depend on each other: ``--only`` trains one of them.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

# Without this, cuBLAS may choose another algorithm from one run to the next.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from corpus import held_out_triples, make_data, make_training, write_data

HERE = Path(__file__).parent
TOKENIZER_DOCUMENTS = 20_000


def main() -> None:
    """Read the command line and make what it asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=8_000, help="training steps of each model")
    parser.add_argument("--documents", type=int, default=100_000, help="training documents")
    parser.add_argument("--only", choices=("softmax", "softpick"), help="train one of the pair")
    parser.add_argument("--out", type=Path, default=HERE, help="where to write (this folder)")
    parser.add_argument("--data-only", action="store_true", help="train no model")
    options = parser.parse_args()

    world, evaluation, calibration = make_data(options.seed)
    write_data(options.out, evaluation, calibration)
    if not options.data_only:
        _train_pair(
            options,
            make_training(world, options.seed, held_out_triples(evaluation), options.documents),
        )


def _train_pair(options: argparse.Namespace, documents: list[str]) -> None:
    """Both checkpoints, alike in all but the normalizer."""
    import torch  # here, since the data needs none of these and they take seconds
    from tokens import BOS, EOS, save_tokenizer, train_tokenizer
    from train import ATTENTION_NAMES, Schedule, Shape, save_checkpoint, save_history, train

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # we read none
    torch.set_float32_matmul_precision("high")  # TF32 products on a GPU; float32 elsewhere
    shape, schedule = Shape(), Schedule(steps=options.steps)
    tokenizer = train_tokenizer(documents[:TOKENIZER_DOCUMENTS], shape.vocabulary)
    encoded = tokenizer.encode_batch(documents)
    stream = torch.tensor([i for text in encoded for i in (BOS, *text.ids, EOS)])
    counts = {"documents": len(documents), "corpus_tokens": len(stream)}
    counts["trained_tokens"] = schedule.steps * schedule.rows * shape.context
    print(f"{counts['documents']:,} documents, {counts['corpus_tokens']:,} tokens")
    command = (
        f"python recipes/demo/make.py --seed {options.seed} --device {options.device}"
        f" --steps {options.steps} --documents {options.documents}"
    )
    for normalizer in (options.only,) if options.only else ATTENTION_NAMES:
        trained = train(
            stream.to(options.device),
            normalizer=normalizer,
            shape=shape,
            schedule=schedule,
            seed=options.seed,
        )
        folder = options.out / normalizer
        save_checkpoint(trained.model, folder, normalizer=normalizer, shape=shape)
        save_tokenizer(tokenizer, folder, shape.context)
        save_history(
            trained,
            folder,
            schedule=schedule,
            seed=options.seed,
            command=command,
            corpus=counts,
        )
        print(f"{normalizer}: loss {trained.loss[-1][1]:.4f}, written to {folder}")


if __name__ == "__main__":
    main()
