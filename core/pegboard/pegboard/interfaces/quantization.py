"""Kind `quantization`: how weights are stored and multiplied. Keyed by `quant_method`; plain
weights are the method "none". Runs in W.

Core calls the methods of a weight in this order, layer by layer: declare → accept (once per
checkpoint piece) → finish → bind → calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pegboard.interfaces.spec import Need, Spec
from pegboard.interfaces.weight_loader import Box, WantedWeight, joined

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.interfaces.attention import AttentionLayer
    from pegboard.interfaces.weight_loader import TensorEntry, WeightPiece


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationSpec(Spec):
    """Entry-point name: the `quant_method`. supports: `dtype` (activation dtypes). flags: "online"
    = it quantizes plain checkpoints while they are loaded. reads: other methods whose checkpoints
    it reads when the user asks for it by name."""

    FLAGS = frozenset({"online"})

    reads: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationNeed(Need):
    dtype: str | None = None


@dataclass(eq=False, slots=True)
class RepackCache:
    """Where a kernel may keep the packed weights of one checkpoint between starts. The kernel reads
    and writes the files.

    root: the folder with the files of all checkpoints. digest: of this checkpoint. limit_bytes: of
    all files in `root` together. files: None at first. The kernel that keeps weights puts its own
    object here, which then lives as long as the engine.
    """

    root: Path
    digest: str
    limit_bytes: int
    files: object | None = None

    def entry(self, path: str, content: object) -> "RepackEntry":
        """Return the place of one weight. path: of the layer. content: JSON values that determine,
        with the checkpoint, the weight's values: method, stored types, rows of the parts."""
        return RepackEntry(self, (self.digest, path, content))


@dataclass(frozen=True, slots=True)
class RepackEntry:
    """One weight's place in the repack cache. key: JSON values that determine the weight's values.
    A kernel adds the name of its layout."""

    cache: RepackCache
    key: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class QuantizationSetup:
    """config: the checkpoint's quantization config, {} if there is none. dtype, device: of
    activations, torch names. kernels: bound ops by name (a reference of `pegboard.ops`, or a faster
    version). repack_cache: None = packed weights are not kept. plain_dtype: torch name of the type
    that weights of floats are held in; None = dtype. rounding: when activations are rounded as the
    checkpoint asks: "checkpoint" = always, "auto" = where a kernel is faster with it, "none"."""

    config: Mapping[str, Any]
    dtype: str
    device: str
    kernels: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    repack_cache: RepackCache | None = None
    plain_dtype: str | None = None
    rounding: str = "none"


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank holds of a checkpoint's matrix. shape: of the whole matrix. rows, columns: those
    that the rank holds, [start, stop). Formats with blocks can only be cut between them."""

    shape: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def box(self) -> Box:
        """The rows and the columns."""
        return self.rows, self.columns

    def of(self, matrix: "Tensor") -> "Tensor":
        """Return the part of a matrix of this shape, as a view."""
        return matrix[slice(*self.rows), slice(*self.columns)]


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint matrix of a merged weight, or a part of one. rows: the rows of the merged
    weight that it fills, [start, stop). cut: the part of the matrix that this rank holds; None =
    all of it."""

    name: str
    rows: tuple[int, int]
    cut: Cut | None = None

    def shape(self, columns: int) -> tuple[int, int]:
        """Return the shape of the checkpoint's matrix. columns: of the merged weight."""
        return (self.rows[1] - self.rows[0], columns) if self.cut is None else self.cut.shape


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """y = x Wᵀ + b with W [out_features, in_features]. The `parts` fill W from top to bottom; rows
    after the last part are zero. If several ranks divide the layer, W is what this rank holds.
    is_head: the outputs are logits. num_experts: W consists of the matrices of this many experts,
    which have equal numbers of rows; 0 = it is not of experts."""

    path: str
    in_features: int
    out_features: int
    parts: tuple[Part, ...]
    is_head: bool = False
    num_experts: int = 0


@dataclass(frozen=True, slots=True)
class EmbeddingLayer:
    """A table [num_rows, width]. is_head: the table is also the matrix of the output head
    (tied)."""

    path: str
    num_rows: int
    width: int
    part: Part
    is_head: bool = False


def wanted_parts(parts: Iterable[Part], columns: int) -> list[WantedWeight]:
    """Return the parts as tensors that are stored under their own names, [rows of the part,
    columns]."""
    return [
        *joined(
            WantedWeight(
                part.name, part.shape(columns), () if part.cut is None else (part.cut.box,)
            )
            for part in parts
        ).values()
    ]


class WeightMethod(Protocol):
    """One weight of one layer in one format."""

    def declare(self, available: "Mapping[str, TensorEntry]") -> list[WantedWeight]:
        """Return the checkpoint tensors that the weight is read from: the parts themselves
        (`wanted_parts`), or what the format stores in their place (packed integers, scales, zero
        points). available: the checkpoint's tensors."""

    def accept(self, piece: "WeightPiece") -> None:
        """Take one piece in checkpoint form. It may be kept until `finish`. On a reload the pieces
        come again and use the same storage."""

    def finish(self) -> None:
        """Repack the pieces, which are complete now, into the layout to compute with. A second call
        writes to the same addresses."""

    def bind(self, kernels: Mapping[str, Callable[..., Any]]) -> "Callable[[Tensor], Tensor]":
        """Return the callable for the layer's forward. Linear: [T, in] → [T, out], without bias.
        Embedding: [T] ids → [T, width]."""

    def dequantize(self) -> "Tensor":
        """Return the weight as float32 [out, in], for tests, absorption and tied heads of other
        formats."""

    def tensors(self) -> "list[Tensor]":
        """Return the memory that the weight takes after `finish`: it is counted, and released while
        the engine sleeps. A reload writes all of it again, so what only the first load writes is
        not in it."""


@runtime_checkable
class DividedMethod(Protocol):
    """An optional addition to a WeightMethod whose format cannot be divided everywhere."""

    def check_division(
        self, available: "Mapping[str, TensorEntry]", first: "Mapping[str, WeightPiece]"
    ) -> None:
        """Raise ModelError if the format cannot be divided as the layer's parts are cut. Called
        after `declare`, before any other tensor is read. available: the checkpoint's tensors.
        first: the pieces of those that were declared with `is_first`."""


class HeadMethod(Protocol):
    """An optional addition to the WeightMethod of an embedding with `is_head`: it multiplies with
    the same table."""

    def bind_head(self, kernels: Mapping[str, Callable[..., Any]]) -> "Callable[[Tensor], Tensor]":
        """Return the callable [N, width] → [N, num_rows]."""


class ExpertsMethod(Protocol):
    """An optional addition to the WeightMethod of a layer with `num_experts`."""

    def bind_experts(
        self, kernels: Mapping[str, Callable[..., Any]], num_experts: int, bias: "Tensor | None"
    ) -> "Callable[[Tensor, Tensor], Tensor]":
        """Return the callable (x [N, in], starts int32 [E + 1]) → [N, out / E]. The rows of x are
        sorted by expert; expert e multiplies the rows from starts[e] to starts[e + 1]. bias: [E,
        out / E], added to the results."""


@dataclass(frozen=True, slots=True)
class ExpertMemory:
    """The memory of each expert of a weight, as contiguous tensors: all that is not the same for
    every expert. form: JSON values. If they are equal, the memory of an expert may be filled with
    that of another one, also on another rank."""

    form: object
    experts: "Sequence[Sequence[Tensor]]"


class MovableExpertsMethod(Protocol):
    """An optional addition to the WeightMethod of a layer with `num_experts`: its experts can move
    to other ranks."""

    def expert_memory(self, num_experts: int) -> ExpertMemory | None:
        """Return the memory of the experts after `finish`, or None if they cannot be exchanged, for
        example because they are stored in different formats."""


class QuantizationMethod(Protocol):
    """One instance per engine and rank. If a method returns None, the plain method takes the
    layer."""

    def linear(self, layer: LinearLayer) -> WeightMethod | None: ...

    def embedding(self, layer: EmbeddingLayer) -> WeightMethod | None: ...

    def kv_cache(self, layer: "AttentionLayer") -> str | None:
        """Return the torch name of the type that the KV cache should store, or None for the type of
        weights that are not quantized."""
