"""Proof that a cell was quantized as it says."""

from __future__ import annotations

from qbench.record.written import Written


class ModuleAudit(Written):
    """One quantized module, measured on the weights that scoring used."""

    name: str
    kind: str  # class of the module that ran, e.g. "Linear4bit"
    parameters: int  # weights of the original module, bias left out
    bits_per_weight: float  # stored, scales and zeros counted
    weight_error: float  # ‖W' − W‖ / ‖W‖ against the unquantized weights, Frobenius
    gain: float | None = None  # ⟨W', W⟩ / ⟨W, W⟩: about 1, 1.03 where all scales are 3 % too large
    levels: int  # most distinct values in one group of one row
    dead_inputs: int = 0  # columns that became zeros: GPTQ does so where calibration never is other
    digest: str = ""  # SHA-256 of what is stored for it; "" where it is not known


class InputAudit(Written):
    """What one module takes in, measured on a probe text as its product consumes it."""

    name: str
    levels: int  # most distinct values under one scale
    clipped: float  # share of values beyond the largest that their scale allows
    error: float  # ‖x' − x‖ / ‖x‖, Frobenius; infinite where not finite


class ActivationAudit(Written):
    """What products with weight matrices took in."""

    bits: float
    levels: int  # most distinct values under one scale, over all modules
    clipped: float  # share over all values
    error: float  # ‖x' − x‖ / ‖x‖ over all modules
    left_out: tuple[str, ...] = ()  # layers whose inputs stay unquantized
    unmeasured: tuple[str, ...] = ()  # modules that the probe text never reached
    modules: tuple[InputAudit, ...] = ()


class Leak(Written):
    """How far what must not matter moved a logit. ``declared``: the settings say that it does."""

    moved: float  # largest |difference| of a logit
    tolerance: float  # what rounding may move: from the unquantized model and from a repetition
    declared: bool


class KVModuleAudit(Written):
    """The KV cache of one attention module, measured on what its attention read."""

    name: str
    levels: int  # most distinct values that share a scale
    key_error: float  # ‖K' − K‖ / ‖K‖ over the quantized tokens of the probe, Frobenius
    value_error: float
    clipped: float  # share of values farther than half a step from what they stand for
    bits_per_value: float  # of a quantized token, its share of scales and lowest values counted


class KVAudit(Written):
    """The KV cache of a cell, all modules together. Memory is that of one sequence of ``tokens``
    tokens, those that are kept unquantized counted with 16 bits a value."""

    levels: int
    clipped: float
    key_error: float
    value_error: float
    tokens: int  # the context that the checkpoint states
    bits_per_value: float
    bytes_per_token: float
    unquantized_bytes_per_token: float
    modules: tuple[KVModuleAudit, ...] = ()


class HeadsAudit(Written):
    """Attention heads that were cut out, as layer and head from 0, of ``total``.
    ``largest_output``: the largest |value| that one of them gave on the probe text."""

    total: int
    pruned: tuple[tuple[int, int], ...]
    largest_output: float

    @property
    def share(self) -> float:
        return len(self.pruned) / self.total if self.total else 0.0


class Audit(Written):
    """What was measured of a cell's quantized model. ``problems``: why it did not pass."""

    passed: bool
    bits: float | None  # nominal; None for unquantized cells
    coverage: float  # quantized weights / weights of all matrices but embeddings and LM head
    bits_per_weight: float  # mean over quantized modules, weighted by parameters
    weight_error: float  # ‖W' − W‖ / ‖W‖ over all quantized modules; infinite where not finite
    levels: int  # most distinct values in one group, over all modules
    logits_moved: float  # largest |difference| from the unquantized model on a probe text
    left_out: tuple[str, ...] = ()  # weight matrices that were not quantized
    left_out_because: dict[str, str] = {}  # noqa: RUF012  why not, by name
    problems: tuple[str, ...] = ()  # one line each
    modules: tuple[ModuleAudit, ...] = ()
    activations: ActivationAudit | None = None  # None where they are not quantized
    causality: Leak | None = None  # the last token was changed, earlier logits watched
    batch_mates: Leak | None = None  # the rest of a batch was changed
    digest: str = ""  # SHA-256 over the names and digests of all modules; "" if unquantized
    # How far treating outliers alone moved the unquantized model's logits, of their norm: rounding
    treatment_error: float | None = None
    kv_cache: KVAudit | None = None  # None where it is not quantized
    heads: HeadsAudit | None = None  # None where none are pruned
