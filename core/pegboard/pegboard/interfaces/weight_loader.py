"""Kind `weight_loader`: one checkpoint format. A loader describes it in Hugging Face terms (A,
without torch) and streams its weights (W)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.interfaces.model_source import LocalFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLoaderSpec(Spec):
    """Entry-point name: the format, chosen by `--load-format` or by the files.
    file_patterns: fnmatch patterns of the weight files that it reads. magic: first bytes of such a
    file, if the format has any. A directory matches if it contains such a file. adapters: path of a
    function that reads a LoRA adapter in W: its folder and the Checkpoint of the base model → (the
    factor of its products, {module path: (A [rank, in], B [out, rank])}), with rows of B in the
    order of the base model. It raises ModelError; None = it reads none. flags: "shares" = it also
    saves what each rank reads, as a ShareSaver."""

    FLAGS = frozenset({"shares"})

    file_patterns: tuple[str, ...] = ()
    magic: bytes | None = None
    adapters: str | None = None


Box = tuple[tuple[int, int], ...]
"""A rectangle of a tensor: [start, stop) in each dimension."""


@dataclass(frozen=True, slots=True)
class WeightLoaderSetup:
    """seed: for loaders that generate the weights. rank: the rank that reads, among `ranks`.
    layout: what the ranks divide, in words; "" if nothing is read."""

    seed: int = 0
    rank: int = 0
    ranks: int = 1
    layout: str = ""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One stored tensor. shape: logical shape, rows first. stored: its type in the file ("float32",
    "bfloat16", "Q4_1", …). file: relative to the checkpoint's folder, or absolute. key: its name
    there; "" = `name`. offset, num_bytes: its place in the file, in bytes."""

    name: str
    shape: tuple[int, ...]
    stored: str
    file: str
    offset: int
    num_bytes: int
    key: str = ""


@dataclass(frozen=True, slots=True)
class TokenizerPayload:
    """What a tokenizer plugin needs. format: "hf" for files in `directory`, next to the checkpoint,
    or a name that the loader gives. In that case, `data` has the loader's data as plain values
    (str, numbers, lists)."""

    format: str
    directory: Path | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The description of a checkpoint. All later stages read only this. Picklable.

    config: Hugging Face-shaped configuration (`hidden_size`, `num_hidden_layers`, `rope_parameters`
    or `rope_theta`, …). tensors: index by the names that checkpoints of this architecture use in
    Hugging Face layout. quantization: the checkpoint's quantization config ({"quant_method": …}),
    or None for plain weights. dtype: torch name of the type ("float32", "bfloat16") that the config
    names, or else of most weights; None if neither says. rope_style: the order of Q and K rows:
    "halves" (Hugging Face) or "pairs" (interleaved, as GGUF stores Llama).
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
    """A tensor that a layer needs. shape: as the layer expects it, or () if the layer does not
    know. Loaders that generate the weights need it. boxes: the parts of it that this rank reads; ()
    = all. A loader may deliver any values outside of them, so a layer that moves rows or columns
    of a piece declares no boxes. is_first: it is small, and is also read before all others, because
    it says whether ranks can divide a weight."""

    name: str
    shape: tuple[int, ...] = ()
    boxes: tuple[Box, ...] = ()
    is_first: bool = False

    def __or__(self, other: "WantedWeight") -> "WantedWeight":
        """Return the same tensor with the boxes of both."""
        is_whole = not self.boxes or not other.boxes
        boxes = () if is_whole else tuple(dict.fromkeys(self.boxes + other.boxes))
        return replace(self, boxes=boxes, is_first=self.is_first or other.is_first)


def joined(wanted: Iterable[WantedWeight]) -> dict[str, WantedWeight]:
    """Return the tensors by name, each once."""
    by_name: dict[str, WantedWeight] = {}
    for weight in wanted:
        known = by_name.get(weight.name)
        by_name[weight.name] = weight if known is None else known | weight
    return by_name


@dataclass(slots=True)
class WeightPiece:
    """The data of a tensor. data: a torch tensor for plain types. For all others, the raw bytes of
    the stored blocks; `shape` is then the logical shape. It may be a read-only view of mapped
    memory: copy it before changing it, and do not keep it after the layer's `finish`."""

    name: str
    stored: str
    shape: tuple[int, ...]
    data: "Tensor | memoryview"


class WeightLoader(Protocol):
    def describe(self, files: "LocalFiles") -> Checkpoint:
        """Describe the checkpoint from its headers alone. Called in A, so it must not import torch.
        Raises ModelError, which names the file and what is wrong with it (missing, truncated,
        unknown architecture, unsafe format)."""

    def tensors(
        self, checkpoint: Checkpoint, wanted: Iterable[WantedWeight]
    ) -> Iterator[WeightPiece]:
        """Stream the wanted tensors from memory-mapped files, in file order and each exactly once.
        Called in W. Raises ModelError if the data is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareFiles:
    """Where the share of a rank is saved. pattern: name of the files, with {rank} and {part}; None
    = the loader's. max_bytes: of the tensors in a file; a larger tensor has one of its own. None =
    one file."""

    folder: Path
    pattern: str | None = None
    max_bytes: int | None = None


class ShareSaver(Protocol):
    """An addition to a WeightLoader with the flag "shares"."""

    def save(
        self,
        checkpoint: Checkpoint,
        wanted: Mapping[str, WantedWeight],
        pieces: Iterable[WeightPiece],
        files: ShareFiles,
    ) -> None:
        """Write what this rank reads of a checkpoint. Called in W. wanted: the tensors by name.
        pieces: their data. Raises ModelError if a file cannot be written."""
