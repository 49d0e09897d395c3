"""Kind `quantization`: how weights are stored and multiplied. Keyed by `quant_method`; "none" is one too. Runs in W.

Life of a weight, driven by core layer by layer: declare → accept (once per checkpoint piece) → finish → bind → calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.interfaces.spec import Need, Spec

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.interfaces.attention import AttentionLayer, KVQuantization
    from pegboard.interfaces.weight_loader import WeightPiece


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationSpec(Spec):
    """Entry-point name: the `quant_method`. supports: `dtype` (activation dtypes). flags: "online" = quantizes plain
    checkpoints at load."""

    FLAGS = frozenset({"online"})


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationNeed(Need):
    dtype: str | None = None


@dataclass(eq=False, slots=True)
class RepackCache:
    """Where a kernel may keep the packed weights of one checkpoint between starts. The kernel reads and writes the files.

    root: folder of all checkpoints. digest: of this checkpoint. limit_bytes: of all files in `root` together. files: empty at
    first; the kernel that keeps weights puts its own object here, which then lives as long as the engine.
    """

    root: Path
    digest: str
    limit_bytes: int
    files: object | None = None

    def entry(self, path: str, content: object) -> "RepackEntry":
        """path: of the layer. content: JSON values that, with the checkpoint, determine the weight's values: method, stored
        types, this rank's slices."""
        return RepackEntry(self, (self.digest, path, content))


@dataclass(frozen=True, slots=True)
class RepackEntry:
    """One weight's place in the repack cache. key: JSON values that determine the weight's values. A kernel adds the name of its
    layout."""

    cache: RepackCache
    key: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class QuantizationSetup:
    """config: the checkpoint's quantization config ({} when there is none). dtype, device: of activations, torch names.
    kernels: bound ops by name (`pegboard.ops` reference or faster). repack_cache: None = packed weights are not kept."""

    config: Mapping[str, Any]
    dtype: str
    device: str
    kernels: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    repack_cache: RepackCache | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor of a merged weight, as this rank holds it.

    name: checkpoint tensor name. rows: rows of the merged weight it fills, [start, stop). shape: shape of the whole
    checkpoint tensor. split_dim/split_start/split_stop: the slice of it this rank takes (dim None = all).
    """

    name: str
    rows: tuple[int, int]
    shape: tuple[int, ...]
    split_dim: int | None = None
    split_start: int = 0
    split_stop: int = 0


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """y = x Wᵀ + b with W [out_features, in_features] (this rank's share); `parts` fill it from top to bottom.
    is_head: its outputs are logits."""

    path: str
    in_features: int
    out_features: int
    parts: tuple[Part, ...]
    is_head: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddingLayer:
    """A table [num_rows, width]; `is_head`: it also multiplies as the output head (tied)."""

    path: str
    num_rows: int
    width: int
    part: Part
    is_head: bool = False


class WeightMethod(Protocol):
    """One weight in one format; made per layer."""

    def declare(self) -> list[str]:
        """Checkpoint tensor names wanted in addition to those of the parts (scales, zero points); [] for most. Raises ConfigError
        with the reason when a part's split does not fall on the format's block borders."""

    def accept(self, piece: "WeightPiece") -> None:
        """One piece in checkpoint form (already this rank's slice); it may be kept until `finish`. May come again later (reload):
        same storage."""

    def finish(self) -> None:
        """All pieces are here: repack into the layout to compute with; a second time writes to the same addresses."""

    def bind(self, kernels: Mapping[str, Callable[..., Any]]) -> "Callable[[Tensor], Tensor]":
        """The callable for the layer's forward: linear [T, in] → [T, out] without bias; embedding [T] ids → [T, width]."""

    def dequantize(self) -> "Tensor":
        """float32 [out, in]: for tests, absorption and tied heads of other formats."""

    def num_bytes(self) -> int:
        """Bytes held in memory."""


class HeadMethod(Protocol):
    """Optional, of an embedding's WeightMethod with `is_head`: multiply with the same table."""

    def bind_head(self, kernels: Mapping[str, Callable[..., Any]]) -> "Callable[[Tensor], Tensor]":
        """[N, width] → [N, num_rows]."""


class QuantizationMethod(Protocol):
    """One per engine and rank. A method that returns None leaves the layer to the plain method."""

    def linear(self, layer: LinearLayer) -> WeightMethod | None: ...

    def embedding(self, layer: EmbeddingLayer) -> WeightMethod | None: ...

    def kv_cache(self, layer: "AttentionLayer") -> "KVQuantization | None":
        """Format and scales of the KV cache the checkpoint wants; None = the compute dtype."""
