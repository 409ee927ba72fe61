"""The base class of normalizers, their registry, and the normalizer of scaled scores. Imports no
torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from qbench.errors import UnavailableError
from qbench.plugins import Registry, source_digest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A tensor with one number per query head that a definition needs beside the scores.

    ``attribute``: its name in the model's attention module, and in checkpoints. ``keyword``: its
    name as an argument of transformers' attention functions, if it has one. A definition has a
    default of its own for a tensor that is not ``required``. ``initial``: the initial value in
    training; ``geometric``: ALiBi's slopes instead.
    """

    name: str
    trainable: bool
    attribute: str
    keyword: str | None = None
    required: bool = True
    initial: float = 0.0
    geometric: bool = False

    def start(self, heads: int) -> list[float]:
        """Return the initial values of training, one per head; for slopes 2^(−8 h / H), h = 1 … H
        (Press et al. 2022, section 3)."""
        if self.geometric:
            return [2 ** (-8 * head / heads) for head in range(1, heads + 1)]
        return [self.initial] * heads


# ALiBi (Press et al. 2022): the head's slope times how far a key is behind the query is taken from
# the score before the definition sees it. Any normalizer may list it among its parameters.
SLOPES = Parameter(
    name="slopes", trainable=False, attribute="alibi_slopes", required=False, geometric=True
)


SCORE_FUNCTIONS = ("softmax", "softpick", "rectified", "sigmoid")  # that kernels/formulas.py has


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Which Triton kernels compute a normalizer.

    ``score_function``: its formulas, one of :data:`SCORE_FUNCTIONS`. ``sink``: the denominator has
    e to the parameter ``sinks`` added, or 1 without that parameter. ``scaled``: scores are
    multiplied by the parameter ``s`` times log n for the n keys that a query may see, with
    ``one_more`` log (n + 1). Raises ValueError for a combination that the kernels lack.
    """

    score_function: str
    sink: bool = False
    scaled: bool = False
    one_more: bool = False

    def __post_init__(self) -> None:
        name = self.score_function
        if name not in SCORE_FUNCTIONS:
            names = ", ".join(SCORE_FUNCTIONS)
            raise ValueError(f"kernels have no score function {name!r}; they have {names}")
        if self.sink and name != "softmax":
            raise ValueError(
                f"kernels have a sink only with the score function 'softmax', not {name!r}; set "
                "sink=False"
            )
        if self.scaled and self.elementwise:
            raise ValueError(
                f"kernels cannot scale logits with the elementwise score function {name!r}; set "
                "scaled=False"
            )

    @property
    def elementwise(self) -> bool:
        """Return whether weights need no sum of their row, and scores take the parameter ``bias``,
        −log n by default."""
        return self.score_function == "sigmoid"

    @property
    def needs_expm1(self) -> bool:
        """Return whether scores near 0 lose bits in the fast formulas, so that the forward pass
        flags them and the backward pass has a second, precise form."""
        return self.score_function == "softpick"

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of the parameters that the kernels take."""
        taken = {SLOPES.name: True, "bias": self.elementwise, "s": self.scaled, "sinks": self.sink}
        return tuple(name for name, does in taken.items() if does)


class Normalizer(ABC):
    """Turns the scores of each query into its attention weights. One object, one file.
    ``rows_sum_to_one``: the weights of every query that sees a key sum to one. ``sparse``: weights
    can be exactly zero, so that key tiles may be skipped."""

    name: ClassVar[str]
    description: ClassVar[str]
    rows_sum_to_one: ClassVar[bool]
    sparse: ClassVar[bool]
    parameters: ClassVar[tuple[Parameter, ...]] = ()
    kernels: ClassVar[Kernels | None] = None

    @abstractmethod
    def weights(
        self, scores: Tensor, *, allowed: Tensor | None = None, parameters: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the weights of ``scores`` [..., N] over the last axis, in their dtype: the
        definition.

        A key counts neither in the numerator nor in the denominator if ``allowed`` (bool, broadcast
        to the scores) is False; a row with nothing allowed gives zeros. ``parameters``: by name,
        one number per head each; with any, scores are [..., H, R, N].
        """

    def fraction(
        self, scores: Tensor, *, allowed: Tensor | None = None, parameters: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Return numerator [..., N] and denominator [..., 1] of the weights, with the arguments of
        :meth:`weights`, if that is faster, else None. For inference only; it may overwrite
        ``scores``."""
        return None

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        mask: Tensor | None,
        causal: bool,
    ) -> Tensor | None:
        """Return the result of ``reference.attention`` (same arguments; no window, softcap or
        parameters) by a function of torch, None if torch has none for such inputs."""
        return None

    @property
    def traits(self) -> str:
        """Return a line on its properties, for ``qbench list normalizers``."""
        rows = "rows sum to one" if self.rows_sum_to_one else "rows need not sum to one"
        zeros = "weights can be 0" if self.sparse else "no weight is 0"
        ways = "reference, triton" if self.kernels else "reference"
        parameters = ", ".join(
            f"{parameter.attribute}{'' if parameter.required else ' (optional)'}"
            for parameter in self.parameters
        )
        return f"{rows}; {zeros}; attention: {ways}" + (
            f"; parameters: {parameters}" if parameters else ""
        )

    @property
    def source(self) -> str | None:
        """Return the SHA-256 of the file that defines it, for keys; None for qbench's normalizers,
        whose digest every key holds."""
        if type(self).__module__.startswith("qbench."):
            return None
        return source_digest(type(self))

    def checked(self, parameters: Mapping[str, Tensor] | None, heads: int) -> dict[str, Tensor]:
        """Return ``parameters`` by name, each [heads]; None counts as {}. Raises UnavailableError
        for an unknown one, or if a required one is missing; ValueError for a wrong shape."""
        given = dict(parameters or {})
        for parameter in self.parameters:
            tensor = given.get(parameter.name)
            if tensor is None and parameter.required:
                raise UnavailableError(
                    f"{self.name} attention needs its parameter {parameter.name!r} [{heads}], and "
                    "none was given; pass it in parameters"
                )
            if tensor is not None and tuple(tensor.shape) != (heads,):
                raise ValueError(
                    f"{self.name}: {parameter.name} must be [{heads}]; it is {list(tensor.shape)}"
                )
        names = [parameter.name for parameter in self.parameters]
        for name in given:
            if name not in names:
                raise UnavailableError(
                    f"{self.name} attention has no parameter {name!r}; it has "
                    f"{', '.join(names) or 'none'}"
                )
        return given


NORMALIZERS: Registry[Normalizer] = Registry("normalizer")


def register(normalizer: Normalizer) -> Normalizer:
    """Register ``normalizer`` under its name for recipes, checkpoints and attention, and return it.
    Raises ValueError if the name is taken, or if its kernels do not take each of its parameters;
    RecipeError for a text that is no name."""
    for parameter in normalizer.parameters if normalizer.kernels else ():
        if parameter.name not in normalizer.kernels.parameters:
            raise ValueError(
                f"the kernels of {normalizer.name!r} do not take its parameter {parameter.name!r}; "
                "set kernels = None, so that the reference computes it, or remove the parameter"
            )
    return NORMALIZERS.add(normalizer.name, normalizer)


def log_lengths(scores: Tensor, allowed: Tensor | None, *, one_more: bool = False) -> Tensor:
    """Return log n for the n keys that each query may see by ``allowed`` (None: all), or with
    ``one_more`` log (n + 1), in the dtype of ``scores`` [..., N], broadcastable; 0 for n = 0."""
    if allowed is None:
        lengths = scores.new_tensor(float(scores.shape[-1]))
    else:
        lengths = allowed.sum(-1, keepdim=True).clamp(min=1 - one_more).to(scores.dtype)
    return (lengths + one_more).log()


# 1 over the mean of log n for n up to 1,024: scores of such rows stay about what they are.
S = Parameter(name="s", trainable=True, attribute="s", initial=0.168)


class Scalable(Normalizer):
    """The normalizer ``plain`` of scores times s · log n, with n the keys that the query may see
    and s trained per head (Nakanishi 2025; the softpick paper's equation 8).

    With ``one_more`` times s · log (n + 1), as flash-linear-attention computes it: its table of
    logarithms begins at log 2 for the first token.
    """

    parameters = (S, SLOPES)

    def __init__(self, plain: Normalizer, *, one_more: bool = False) -> None:
        self.plain, self.one_more = plain, one_more
        self.name = f"scalable-{plain.name}" + ("-next" if one_more else "")
        scale = "s log (n + 1), as flash-linear-attention has it" if one_more else "s log n"
        self.description = f"{plain.name} of the scores times {scale}"
        self.rows_sum_to_one, self.sparse = plain.rows_sum_to_one, plain.sparse
        self.kernels = replace(plain.kernels, scaled=True, one_more=one_more)

    def weights(
        self, scores: Tensor, *, allowed: Tensor | None = None, parameters: Mapping[str, Tensor]
    ) -> Tensor:
        s = parameters["s"].to(scores.dtype)[:, None, None]
        scale = s * log_lengths(scores, allowed, one_more=self.one_more)
        return self.plain.weights(scores * scale, allowed=allowed, parameters={})
