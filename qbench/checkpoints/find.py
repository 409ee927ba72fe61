"""Find a checkpoint by folder or hub id and check its files without loading tensors. Imports no
torch.

Whether our attention computes what the class's own does is measured when it is loaded: no table of
classes decides it; ``tried.csv`` lists those that the tests try."""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from qbench import hub
from qbench.attention import NATIVE, choose
from qbench.attention.normalizers import NORMALIZERS, Parameter
from qbench.checkpoints import fla
from qbench.checkpoints.from_gguf import dequantized_folder
from qbench.errors import CheckpointError, DamagedError, RecipeError, UnavailableError, shown, some
from qbench.files import cache_folder, digest_of_parts, file_digest, kept_digest, reason
from qbench.machine import package_source
from qbench.records import TRAINING_FILE, Trained, read_training

CLASS_NORMALIZERS = ("softmax", "softmax-sink")  # that classes of transformers compute themselves
MOVING_ROPES = ("longrope", "dynamic")  # angles depend on the longest sequence of a batch


class TriedClass(NamedTuple):
    """A line of ``tried.csv``: a class that the tests try, and what they measured."""

    model_type: str
    models: str  # published models of the class
    attention: str
    scoring: str  # the fastest mode
    quantized: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenAttention:
    """Holds the attention that a model runs with. ``implementation``: reference or triton; of
    normalizer ``native`` sdpa or eager. ``why``: the reason for ``native``, else empty."""

    normalizer: str
    implementation: str
    why: str = ""


@functools.cache
def tried_classes() -> tuple[TriedClass, ...]:
    """Return the classes that the tests try, in the order of docs/models.md."""
    with (Path(__file__).parent / "tried.csv").open(encoding="utf-8", newline="") as file:
        return tuple(TriedClass(**row) for row in csv.DictReader(file))


@functools.cache
def class_names() -> dict[str, str]:
    """Return ``model_type`` → class name of all causal language models of transformers, read from
    its source: importing it would import torch."""
    text = package_source("transformers", "models/auto/modeling_auto.py")
    start = text.index("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")
    table = text[start : text.index("\n)\n", start)]
    ours = {"gated-llama": "GatedLlamaForCausalLM"}  # checkpoints/gated.py
    return dict(re.findall(r'\("([\w.-]+)", "(\w+)"\)', table)) | ours


def choose_attention(
    name: str, class_name: str, normalizer: str, requested: str, device: str
) -> ChosenAttention:
    """Return the attention that checkpoint ``name`` of a recipe, trained with ``normalizer``, is
    loaded with if ``evaluation.attention`` is ``requested``; for the normalizer ``native`` always
    the class's own. Raises RecipeError for an unknown name, and if ``requested`` is native and the
    class cannot compute the normalizer; UnavailableError if triton cannot run or has no kernels."""
    if NATIVE not in (normalizer, requested):
        implementation = choose(normalizer, requested, device)
        return ChosenAttention(normalizer=normalizer, implementation=implementation)
    if normalizer not in (NATIVE, *CLASS_NORMALIZERS):
        raise RecipeError(
            f"evaluation.attention: native: checkpoints.{name} was trained with {normalizer}, "
            f"which {class_name} of transformers does not compute; set attention: auto"
        )
    return ChosenAttention(normalizer=NATIVE, implementation="sdpa", why="the recipe says so")


def moving_rope(config: Mapping[str, Any]) -> str | None:
    """Return the kind of rotary embedding if its angles depend on the texts' length; else None."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    types = (str(part.get("rope_type") or part.get("type") or "") for part in parts)
    return next((name for name in types if name.startswith(MOVING_ROPES)), None)


LFS_POINTER = b"version https://git-lfs"
LFS_REMEDY = "is a git-lfs pointer, not the file itself: run `git lfs pull` in its folder"
SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size",
    "n_embd", "n_layer", "n_head", "max_position_embeddings", "n_positions",
)  # fmt: skip


@contextmanager
def named(source: str) -> Iterator[None]:
    """Add the name that the user gave a checkpoint to errors raised in the body: before those about
    its files, behind those about this machine or a class of transformers."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {source}: {error}") from error
    except UnavailableError as error:
        raise UnavailableError(f"{error} (checkpoint {source})") from error


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Make of an OSError in the body a CheckpointError: the file ``name`` cannot be read."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{name} cannot be read ({reason(error)}); correct its permissions, or fetch it again"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file ``path``. Raises CheckpointError if it cannot be read or
    is not an object."""
    with readable(path.name):
        content = path.read_bytes()
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        why = f"is not JSON ({error}); fetch it again"
        why = LFS_REMEDY if content.startswith(LFS_POINTER) else why
        raise CheckpointError(f"{path.name} {why}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} is not a JSON object; fetch it again")
    return value


def read_config(folder: Path, *, quantized: bool = False) -> dict[str, Any]:
    """Return ``config.json`` of an unquantized language model, or of a ``quantized`` one. Raises
    CheckpointError, naming the field, for any other file."""
    if not (folder / CONFIG).exists():
        require_no_adapter(folder)
        raise CheckpointError(
            "no config.json there; name the folder that holds it, or the GGUF file itself, as "
            "DIR/FILE.gguf"
        )
    config = read_json(folder / CONFIG)
    quantization = config.get("quantization_config")
    if quantized and not isinstance(quantization, dict):
        raise CheckpointError(
            "it is not quantized: its config.json has no quantization_config; name a quantized "
            "copy here, and an unquantized model under checkpoints"
        )
    if quantization and not quantized:
        raise CheckpointError(
            "it is quantized already (quantization_config); name the unquantized checkpoint here, "
            "and this one with --quantized LABEL=PATH or in quantizers: [{name: checkpoint, path: "
            "…}]; or score it alone with --quantized or quantizers: [checkpoint]"
        )
    if "transformers_weights" in config:
        raise CheckpointError(
            "config.json: transformers_weights names another weight file than those that qbench "
            f"checks; rename that file to {SINGLE}, and remove this key"
        )
    if config.get("is_encoder_decoder"):
        raise CheckpointError(
            "config.json: is_encoder_decoder: true: only causal language models are scored; leave "
            "this checkpoint out"
        )
    return config


CONFIG = "config.json"


def require_sizes(config: dict[str, Any], tensors: int) -> None:
    """Raise CheckpointError if a size in config.json is not a whole number above zero, or if there
    are more layers than ``tensors``: naming the parameters of such a model would never end."""
    inner = config.get("text_config")
    parts = (config, inner if isinstance(inner, dict) else {})
    for name, value in ((name, part.get(name)) for part in parts for name in SIZES):
        most = tensors if name in ("num_hidden_layers", "n_layer") else math.inf
        plain = type(value) is int and 0 < value <= most
        if not (plain or value is None or isinstance(value, list)):  # a list: one size per layer
            raise CheckpointError(
                f"config.json: {name} {value!r}: must be a whole number above 0, and layers no "
                f"more than the {tensors} weight tensors"
            )


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"  # transformers would add the adapter to the weights
LARGE = 1 << 30  # bytes of a file that one thread takes a second to hash
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
# Causal masks and positions that GPT-2's and GPT-NeoX's files carry along: they are no weights.
BUFFERS = re.compile(r"\.(attn|attention)\.(bias|masked_bias)$|(^|\.)position_ids$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The header of one tensor: its dtype, shape and file."""

    file: str
    name: str  # in that file
    shape: list[int]
    dtype: str  # safetensors' word: BF16, F32, I8, F8_E4M3, …


def require_no_adapter(folder: Path) -> None:
    """Raise CheckpointError if ``folder`` holds an adapter, with or without its base model."""
    if (folder / ADAPTER).exists():
        raise CheckpointError(
            f"{ADAPTER}: the folder holds an adapter; merge it into its base model first, as by "
            "PEFT's merge_and_unload"
        )


def weight_files(folder: Path) -> list[str]:
    """Return the names, sorted, of the files that transformers reads the weights from: those that
    the index lists, else ``model.safetensors``. Raises CheckpointError for an adapter, for pickles
    alone, missing files, a malformed index, and a ``model.safetensors`` that the index omits."""
    require_no_adapter(folder)
    if not (folder / INDEX).exists():
        if (folder / SINGLE).is_file():
            return [SINGLE]
        pickles = [path.name for pattern in PICKLES for path in sorted(folder.glob(pattern))]
        if pickles:
            convert = (
                "import torch; from safetensors.torch import save_file; save_file({k: v.clone() "
                f"for k, v in torch.load('{pickles[0]}', weights_only=True).items()}}, '{SINGLE}')"
                if len(pickles) == 1
                else "from transformers import AutoModelForCausalLM as Model; "
                "Model.from_pretrained('.', dtype='auto').save_pretrained('.')"
            )
            raise CheckpointError(
                f"its weights are pickles ({some(pickles)}), which can run code when they are "
                f'read; if you trust them, run in that folder: python -c "{convert}"'
            )
        raise CheckpointError(
            f"no {SINGLE} there, and no {INDEX} that lists other *.safetensors files; save the "
            "model there with transformers' save_pretrained"
        )
    index = read_json(folder / INDEX)
    files = index.get("weight_map")
    if not isinstance(files, dict) or not all(
        isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name
        for name in files.values()
    ):
        raise CheckpointError(
            f"{INDEX} has no weight_map from tensor names to *.safetensors files; fetch it again"
        )
    if not isinstance(index.get("metadata"), dict):
        raise CheckpointError(f'{INDEX} has no metadata for transformers; add "metadata": {{}}')
    listed = sorted(set(files.values()))
    if missing := [name for name in listed if not (folder / name).is_file()]:
        raise CheckpointError(f"{INDEX} lists files that are missing: {some(missing)}; fetch them")
    if SINGLE not in listed and (folder / SINGLE).exists():
        raise CheckpointError(f"{SINGLE} is not listed in {INDEX}; remove one of the two")
    return listed


def read_headers(
    folder: Path, files: Iterable[str], *, quantized: bool = False
) -> dict[str, Header]:
    """Return the header of each tensor in the weight ``files`` of ``folder``, by name. Raises
    CheckpointError if a file cannot be read, and unless the checkpoint is ``quantized``, if its
    weights are not floating-point numbers."""
    headers: dict[str, Header] = {}
    for path in (folder / file for file in files):
        try:
            with safe_open(path, framework="numpy") as file:  # reads no tensor
                for name in file.keys():  # noqa: SIM118  no mapping
                    part = file.get_slice(name)
                    headers[name] = Header(
                        file=path.name, name=name, shape=[*part.get_shape()], dtype=part.get_dtype()
                    )
        except (SafetensorError, OSError, ValueError) as error:
            with path.open("rb") as file:
                pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
            why = f"is not a safetensors file, or a broken one ({error}); fetch it again"
            raise CheckpointError(f"{path.name} {LFS_REMEDY if pointer else why}") from None
    allowed = FLOATS | {"I64"}  # the latter of tables, as DeepSeek V4's of experts
    others = [n for n, h in headers.items() if h.dtype not in allowed and not BUFFERS.search(n)]
    if others and not quantized:
        first = headers[others[0]]
        raise CheckpointError(
            f"{some(others)}: the first is of type {first.dtype}, in {first.file}; weights must be "
            f"unquantized floating-point numbers ({', '.join(sorted(FLOATS))}): name an "
            "unquantized copy"
        )
    return headers


def elements(headers: dict[str, Header]) -> int:
    """Return how many numbers the tensors hold together."""
    return sum(math.prod(header.shape) for header in headers.values())


# All that transformers reads for a causal model, its generation settings and its tokenizer: a
# change in any of them can change a score. (A tokenizer may also be in tokenizer.4.0.json.)
READ = (
    CONFIG, "generation_config.json", INDEX, "tokenizer*.json", "special_tokens_map.json",
    "added_tokens.json", "merges.txt", "dict.txt", "*vocab*", "*.model", "*.spm", "*.tiktoken",
    "*.tokenizer", "*.codes", "emoji.json", "byte_maps.json", "normalizer.json", "word_*.json",
    "chat_template*", "additional_chat_templates/*",
)  # fmt: skip


def files_read(folder: Path, weights: list[str]) -> tuple[tuple[str, int, int], ...]:
    """Return (path within ``folder``, bytes, time of change in nanoseconds) of all files that
    loading reads: ``weights``, config.json, the others by name. Raises CheckpointError."""
    paths = (path for pattern in READ for path in folder.glob(pattern) if path.is_file())
    names = {path.relative_to(folder).as_posix() for path in paths} - {*weights, CONFIG}
    files = []
    for name in (*weights, CONFIG, *sorted(names)):
        with readable(name):
            stat = (folder / name).stat()
        files.append((name, stat.st_size, stat.st_mtime_ns))
    return tuple(files)


def require_tokenizer(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if the checkpoint has no tokenizer file, loadable or not."""
    weights = {header.file for header in checkpoint.headers.values()}
    names = {name for name, *_ in checkpoint.files if "chat_template" not in name} - weights
    if names <= {CONFIG, INDEX, "generation_config.json"}:
        raise CheckpointError(
            f"checkpoint {checkpoint.source}: no tokenizer; put its tokenizer.json into the folder"
        )


def require_unchanged(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if its files changed since ``find``."""
    if files_read(checkpoint.folder, weight_files(checkpoint.folder)) != checkpoint.files:
        raise CheckpointError("its files changed after this run began; run again")


def digests(folder: Path, names: list[str], weights: list[str]) -> tuple[str, dict[str, str]]:
    """Return the SHA-256 over the ``names`` and contents of files, ``LARGE`` ones in parts; and of
    their parts by ``weights`` (these files), ``config`` and ``tokenizer``. Raises CheckpointError
    if a file cannot be read."""
    total = hashlib.sha256()
    parts = {name: hashlib.sha256() for name in ("weights", "config", "tokenizer")}
    for name in names:
        with readable(name):
            path = folder / name
            large = path.stat().st_size > LARGE
            content = kept_digest(path, digest_of_parts if large else file_digest)
        part = "config" if name in (CONFIG, "generation_config.json", INDEX) else "tokenizer"
        for hashed in (total, parts["weights" if name in weights else part]):
            hashed.update(f"{name} {content}\n".encode())
    return total.hexdigest(), {name: hashed.hexdigest() for name, hashed in parts.items()}


CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len")  # the latter two bound it
POSITIONS = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings)\.weight$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint on disk whose configuration and tensor headers were read and agree. ``digest``
    is the SHA-256 over every file that loading it reads: weights, configuration, generation
    settings, tokenizer and chat template."""

    source: str  # as the user named it
    folder: Path
    normalizer: str
    config: dict[str, Any]
    digest: str
    files: tuple[tuple[str, int, int], ...]  # name, bytes, time of change of what was digested
    digests: dict[str, str] = field(default_factory=dict)  # of weights, config and tokenizer each
    headers: dict[str, Header] = field(default_factory=dict)  # tensors by their names in the files
    training: Trained | None = None  # the summary of its training by qbench; None: by another

    @property
    def class_name(self) -> str:
        """Return the name of the class of transformers that it is loaded as."""
        kind = fla.in_transformers_words(self.config)["model_type"]
        return class_names().get(kind, kind)

    @property
    def max_length(self) -> int | None:
        """Return the longest context in tokens that the configuration states, or None."""
        return next((self.config[key] for key in CONTEXT if self.config.get(key)), None)

    @property
    def positions(self) -> int | None:
        """Return the most tokens of a forward pass; None without a table of positions."""
        table = any(POSITIONS.search(name) for name in self.headers)
        return self.max_length if table or self.config.keys() & set(CONTEXT[1:]) else None


def read_own_training(folder: Path) -> Trained | None:
    """Return the summary of qbench's training that wrote ``folder``; None if it has none, or
    another program's file of that name. Raises CheckpointError if record or config.json were
    changed."""
    try:
        training = read_training(folder / TRAINING_FILE)
    except (OSError, ValueError):  # another program's file may have this name
        return None
    except DamagedError as error:
        raise CheckpointError(
            f"{error}; restore the folder, or remove {TRAINING_FILE} if the change is intended"
        ) from None
    written = training.files.get(CONFIG)
    if written is not None and file_digest(folder / CONFIG) != written:
        raise CheckpointError(
            f"{folder / CONFIG}: changed after training, by its digest in {TRAINING_FILE}; "
            f"restore it, or remove {TRAINING_FILE} if the change is intended"
        )
    return training.summary


def model_headers(checkpoint: Checkpoint) -> dict[str, Header]:
    """Return the checkpoint's headers by the names that the model has for its tensors."""
    headers = checkpoint.headers
    for theirs, llama in fla.NAMES if fla.recognizes(checkpoint.config) else ():
        headers = {name.replace(theirs, llama): header for name, header in headers.items()}
    return headers


def parameters_of(normalizer: str) -> tuple[Parameter, ...]:
    """Return the normalizer's parameters; none for ``native``, whose class reads its own."""
    return () if normalizer == NATIVE else NORMALIZERS[normalizer].parameters


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
FROM_HUB = ("model*.safetensors", *READ)


def find(
    source: str,
    *,
    revision: str | None = None,
    normalizer: str | None = None,
    quantized: bool = False,
) -> Checkpoint:
    """Find the checkpoint ``source``, a folder, a GGUF file (dequantized into the cache) or a hub
    id (downloaded at ``revision``), and check its files. ``normalizer``: the recipe's, which must
    agree with the checkpoint's. ``quantized``: whether its weights are quantized already. Raises
    CheckpointError for files that cannot be loaded."""
    folder = _folder(source, revision)
    with named(source):
        config = read_config(folder, quantized=quantized)
        training = read_own_training(folder)  # refuses what was changed after training
        weights = weight_files(folder)
        headers = read_headers(folder, weights, quantized=quantized)
        require_sizes(config, len(headers))
        trained_with = _normalizer(config, normalizer, headers)
        kind = fla.in_transformers_words(config).get("model_type")  # refuses what no class computes
        if kind not in class_names():
            raise CheckpointError(
                f"config.json: model_type {kind!r} is not a causal language model of the installed "
                "transformers (code in the checkpoint, auto_map, is never run); update "
                "transformers, or leave this checkpoint out"
            )
        # Whether each attention module has its parameter is checked when the model is loaded
        attributes = {name.rpartition(".")[2] for name in headers}
        for parameter in parameters_of(trained_with):
            if parameter.required and parameter.attribute not in attributes:
                raise CheckpointError(
                    f"missing: {parameter.attribute} of every attention module, which "
                    f"{trained_with} needs; correct normalizer in the recipe, or "
                    "qbench_normalizer in config.json"
                )
        files = files_read(folder, weights)
        total, parts = digests(folder, [name for name, *_ in files], weights)
        return Checkpoint(
            source=source,
            folder=folder,
            normalizer=trained_with,
            config=config,
            digest=total,
            digests=parts,
            files=files,
            headers=headers,
            training=training,
        )


def _folder(source: str, revision: str | None) -> Path:
    """Return the local folder of ``source``, a folder, a GGUF file (converted) or a hub id
    (downloaded). Raises CheckpointError if it is none of these."""
    try:
        path = Path(source).expanduser().resolve()
        is_folder, why = path.is_dir(), str(path)
        is_gguf = path.suffix == ".gguf" and path.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        is_folder, is_gguf, why = False, False, str(error)
    if is_folder and revision is not None:
        raise CheckpointError(
            f"checkpoint {source}: a folder has no revisions, and the recipe says revision: "
            f"{revision}; leave it out, or name a hub id"
        )
    if is_folder:
        return path
    if is_gguf:
        return dequantized_folder(path, cache_folder())
    if HUB_ID.fullmatch(source):
        return hub.snapshot(source, revision, FROM_HUB)
    where = "" if why == source else f" ({shown(why)})"
    raise CheckpointError(
        f"checkpoint {shown(source)}: no such folder or GGUF file{where}; name one, or a hub id "
        "(owner/name)"
    )


def _normalizer(config: dict[str, Any], by_recipe: str | None, headers: Iterable[str]) -> str:
    """Return the normalizer that the checkpoint was trained with, by config.json, ``headers`` and
    the recipe (``by_recipe``). Raises CheckpointError if they contradict each other."""
    by_config, by_format = config.get("qbench_normalizer"), None
    if by_config is not None and not (isinstance(by_config, str) and by_config in NORMALIZERS):
        names = ", ".join(NORMALIZERS)
        raise CheckpointError(
            f"config.json: qbench_normalizer {by_config!r} is unknown; known: {names}"
        )
    if fla.recognizes(config) and config.get("attn_impl") is not None:
        implementation = config["attn_impl"]
        if not isinstance(implementation, str) or implementation not in fla.NORMALIZER_OF:
            raise CheckpointError(
                f"config.json: attn_impl {implementation!r} is unknown; known: "
                f"{', '.join(fla.NORMALIZER_OF)}"
            )
        by_format = fla.NORMALIZER_OF[implementation]
        if by_config not in (None, by_format):
            raise CheckpointError(
                f"config.json contradicts itself: attn_impl {implementation!r} means "
                f"{by_format}, but qbench_normalizer is {by_config!r}; correct one of them"
            )
    elif fla.recognizes(config) and by_config is None and by_recipe not in ("softmax", NATIVE):
        raise CheckpointError(
            "config.json has no attn_impl, so its normalizer is unknown; if it was trained "
            "with softmax, put normalizer: softmax into the recipe; else write "
            "qbench_normalizer into its config.json"
        )
    sinks = any(name.endswith(".self_attn.sinks") for name in headers)  # gpt-oss's, Granite SWA's
    by_class = "softmax-sink" if sinks else "softmax"
    normalizer = by_format or by_config or by_class
    if by_recipe == NATIVE and normalizer == by_class:
        return NATIVE
    if by_recipe not in (None, normalizer):
        if by_format or by_config:
            reason = f"its config.json says {normalizer}"
        elif sinks:
            reason = "its weights have learned sinks"
        else:
            reason = f"its config.json names no attention function, which means {normalizer}"
        raise CheckpointError(
            f"{reason}, but the recipe says normalizer: {by_recipe}; leave normalizer out, or, if "
            f"it was trained so, write qbench_normalizer: {by_recipe} into its config.json"
        )
    return normalizer


Shapes = dict[str, tuple[int, int]]  # outputs, inputs

# Last parts of names: embeddings, LM heads, routers, convolutions, states, norms.
NONE_OF_THESE = re.compile(
    r"\w*embed\w*|wte|wpe|(lm_)?head|\w*conv\w*|A_log|gate|router|\w*norm\w*|ln_\w+"
)
ENDS = re.compile(r"\w*embed\w*|wte|wpe|(lm_)?head")
EXPERTS = re.compile(r"(^|\.)experts\.")
FUSED = re.compile(r"(^|\.)experts\.(gate_up_proj|up_proj|down_proj)$")


def linear_shapes(checkpoint: Checkpoint) -> Shapes:
    """Return (outputs, inputs) by layer name of each linear layer and of fused experts (of one of
    them). Embeddings, LM head and routers are left out. A matrix is read as transposed if its bias
    is as long as its columns."""
    headers, shapes = model_headers(checkpoint), {}
    for full, header in headers.items():
        name = full.removesuffix(".weight")
        if FUSED.search(name) and len(header.shape) == 3:
            (rows, columns), bias = header.shape[1:], headers.get(f"{name}_bias")
        elif full.endswith(".weight") and len(header.shape) == 2 and not _no_linear_layer(name):
            (rows, columns), bias = header.shape, headers.get(f"{name}.bias")
        else:
            continue
        turned = bias is not None and bias.shape[-1] != rows and bias.shape[-1] == columns
        shapes[name] = (columns, rows) if turned else (rows, columns)
    return shapes


def end_shapes(checkpoint: Checkpoint) -> Shapes:
    """Return (outputs, inputs) of LM head and embeddings by name; if they share one matrix, it is
    listed once, as ``lm_head``."""
    shapes = {
        name: tuple(header.shape)
        for name, header in ((n.removesuffix(".weight"), h) for n, h in
                             model_headers(checkpoint).items())
        if ENDS.fullmatch(name.rpartition(".")[2]) and len(header.shape) == 2
    }  # fmt: skip
    has_head = any(name.startswith(("lm_head", "embed_out", "head")) for name in shapes)
    return shapes if has_head or not shapes else {"lm_head": next(iter(shapes.values()))}


def has_other_matrices(checkpoint: Checkpoint) -> bool:
    """Return whether the files hold weight matrices beside linear layers, embeddings and LM head:
    experts, routers, convolutions, states."""
    names = (n.removesuffix(".weight") for n, h in checkpoint.headers.items() if len(h.shape) > 1)
    return any(_no_linear_layer(n) and not ENDS.fullmatch(n.rpartition(".")[2]) for n in names)


def _no_linear_layer(name: str) -> bool:
    """Return whether the matrix ``name`` is no linear layer's: embeddings, routers, experts."""
    last = name.rpartition(".")[2]
    router = "router" in name.split(".")
    return router or bool(NONE_OF_THESE.fullmatch(last) or EXPERTS.search(name))


def has_chat_template(folder: Path) -> bool:
    """Return whether ``folder`` has a chat template, as a file or in tokenizer_config.json."""
    if any(folder.glob("*chat_template*")):
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_bytes())["chat_template"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
