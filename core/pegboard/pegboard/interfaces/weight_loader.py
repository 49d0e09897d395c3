"""Kind `weight_loader`: one checkpoint format. Describes it in Hugging Face terms (A, no torch) and streams its weights (W)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.interfaces.model_source import LocalFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLoaderSpec(Spec):
    """Entry-point name: the format, chosen by `--load-format` or by the files.
    file_patterns: fnmatch patterns of weight files it reads. magic: first bytes of such a file, if the format has any.
    A directory is matched when it holds such a file."""

    file_patterns: tuple[str, ...] = ()
    magic: bytes | None = None


@dataclass(frozen=True, slots=True)
class WeightLoaderSetup:
    """seed: for loaders that make weights up."""

    seed: int = 0


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One stored tensor: logical shape (rows first), stored type ("float32", "bfloat16", "Q4_1", …), file, byte offset and
    length."""

    name: str
    shape: tuple[int, ...]
    stored: str
    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TokenizerPayload:
    """What a tokenizer plugin needs. format: "hf" (files next to the checkpoint, in `directory`) or a name that the loader gives,
    with its data in `data` (plain values: str, numbers, lists)."""

    format: str
    directory: Path | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint in one description; everything downstream reads only this. Picklable.

    config: Hugging Face-shaped configuration (`hidden_size`, `num_hidden_layers`, `rope_parameters` or `rope_theta`, …).
    tensors: index by the names that architecture's checkpoints use in Hugging Face layout.
    quantization: the checkpoint's quantization config ({"quant_method": …}) or None for plain weights.
    dtype: torch name of the weights' main type ("float32", "bfloat16"), None when quantized only.
    rope_style: how Q and K rows are ordered: "halves" (Hugging Face) or "pairs" (interleaved, as GGUF stores Llama).
    """

    format: str
    path: Path
    config: Mapping[str, Any]
    architectures: tuple[str, ...]
    tensors: Mapping[str, TensorEntry]
    tokenizer: TokenizerPayload
    quantization: Mapping[str, Any] | None = None
    dtype: str | None = None
    rope_style: Literal["halves", "pairs"] = "halves"
    chat_template: str | None = None
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""


@dataclass(frozen=True, slots=True)
class WantedWeight:
    """A tensor that a layer wants. shape: as the layer expects it, () when the layer does not know; for loaders that make weights
    up."""

    name: str
    shape: tuple[int, ...] = ()


@dataclass(slots=True)
class WeightPiece:
    """Delivered data. `data`: a torch tensor for plain types, raw bytes of the stored blocks otherwise (then `shape` is the
    logical shape). May be a read-only view of mapped memory: copy before changing, do not keep after the layer's `finish`."""

    name: str
    stored: str
    shape: tuple[int, ...]
    data: "Tensor | memoryview"


class WeightLoader(Protocol):
    def describe(self, files: "LocalFiles") -> Checkpoint:
        """Read headers only. Called in A: must not import torch. Raises ModelError naming the file and what is wrong with it
        (missing, truncated, unknown architecture, unsafe format)."""

    def tensors(self, checkpoint: Checkpoint, wanted: Iterable[WantedWeight]) -> Iterator[WeightPiece]:
        """Stream the wanted tensors in file order, each exactly once, from memory-mapped files. Called in W. Raises ModelError
        on damaged data."""
