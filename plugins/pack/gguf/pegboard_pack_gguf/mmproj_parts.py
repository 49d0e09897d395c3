"""What the families of towers in GGUF files share: how one is described, and readers of
metadata and vocabularies. Standard library only."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pegboard.errors import ModelError
from pegboard_pack_gguf.header import GGUFHeader
from pegboard_pack_gguf.metadata import Metadata

VISION = "clip.vision"
AUDIO = "clip.audio"
_ANY = {
    "clip.has_audio_encoder",
    "clip.has_llava_projector",
    "clip.has_text_encoder",
    "clip.has_vision_encoder",
    "clip.projector_type",
}
_TOWER = (
    "attention.head_count",
    "attention.layer_norm_epsilon",
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "projection_dim",
    "projector_type",
)
_IMAGES = ("image_mean", "image_size", "image_std", "patch_size")
KNOWN = {
    VISION: frozenset(
        {*_ANY, "clip.use_gelu", "clip.use_silu"}
        | {f"{VISION}.{name}" for name in (*_TOWER, *_IMAGES)}
    ),
    AUDIO: frozenset(_ANY | {f"{AUDIO}.{name}" for name in _TOWER}),
}
"""The keys that are read in all files, by the place of the tower's metadata."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a tower. width: of its vectors. image, patch: pixels of a side, 0 for audio.
    text: the width of the language model."""

    width: int
    depth: int
    heads: int
    image: int
    patch: int
    eps: float
    text: int

    @classmethod
    def of(cls, metadata: Metadata, text: Mapping[str, Any]) -> Sizes:
        """Read them. Raises ModelError."""
        is_vision = metadata.prefix == VISION
        return cls(
            width=metadata.count("embedding_length"),
            depth=metadata.count("block_count"),
            heads=metadata.count("attention.head_count"),
            image=metadata.count("image_size") if is_vision else 0,
            patch=metadata.count("patch_size") if is_vision else 0,
            eps=metadata.number("attention.layer_norm_epsilon"),
            text=text["hidden_size"],
        )

    @property
    def of_patches(self) -> tuple[int, ...]:
        """The shape of the matrix of patches."""
        return (self.width, 3, self.patch, self.patch)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the config of a model is made of. metadata: of the tower's file, below its place.
    language: of the language model's. shapes: of the tensors of the tower's file. text: the config
    of the language model. tokens: its vocabulary."""

    metadata: Metadata
    language: Metadata
    sizes: Sizes
    shapes: Shapes
    text: Mapping[str, Any]
    tokens: Sequence[str]

    def has(self, tensor: str) -> bool:
        """Return whether the tower's file has a tensor."""
        return tensor in self.shapes

    def fail(self, what: str) -> ModelError:
        """Return an error of the tower's file."""
        return ModelError(f"{self.metadata.header.path}: {what}")


Values = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Projector:
    """A family of towers, by the type of its projector. place: of its metadata. layers: where the
    layers are. layer: Hugging Face names in a layer by those of the file, without the ending
    ".weight" or ".bias"; or both with it. top: Hugging Face names by those of the file, but for
    layers. ignored: tensors that change no result. last: the tensor whose dimension `side` is the
    width of the language model. shapes: of tensors, as the model has them. keys: of the metadata,
    beyond `KNOWN`. config: what the config has beyond the language model's. processor: the
    preprocessor_config.json that the model has on Hugging Face: how items become arrays; what it
    does not say has transformers' defaults. joined: modules of a layer by the Hugging Face name of
    the whole: their parts, below each other. frames: the matrices of patches of each frame, if
    there are several; their names on Hugging Face are that of the whole with a number. has_axes:
    the language model has positions on three axes."""

    layers: str
    layer: Mapping[str, str]
    top: Mapping[str, str]
    last: str
    shapes: Callable[[Parts], Shapes]
    config: Callable[[Parts], Values]
    processor: Callable[[Parts], Values]
    place: str = VISION
    side: int = 0
    keys: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    frames: tuple[str, ...] = ()
    has_axes: bool = False


def both_endings(names: Mapping[str, str]) -> dict[str, str]:
    """Return the names of the weights and of the biases of modules."""
    return {
        f"{name}.{ending}": f"{path}.{ending}"
        for name, path in names.items()
        for ending in ("weight", "bias")
    }


def keys(*names: str, place: str = VISION) -> frozenset[str]:
    """Return keys below a place."""
    return frozenset(f"{place}.{name}" for name in names)


def square_config(parts: Parts) -> Values:
    """Return the vision_config of a tower whose images all have one size."""
    check_grid(parts)
    return any_config(parts)


def any_config(parts: Parts) -> Values:
    """Return what the vision_config of most towers has."""
    sizes = parts.sizes
    return {
        "hidden_size": sizes.width,
        "intermediate_size": parts.metadata.count("feed_forward_length"),
        "num_hidden_layers": sizes.depth,
        "num_attention_heads": sizes.heads,
        "image_size": sizes.image,
        "patch_size": sizes.patch,
        "layer_norm_eps": sizes.eps,
    }


def check_grid(parts: Parts) -> None:
    """Raise ModelError if patches do not fill an image."""
    size = parts.sizes.image
    patch = parts.sizes.patch
    if size % patch:
        raise parts.metadata.fail(
            "image_size", f"is {size}, expected a multiple of patch_size {patch}"
        )


def activation(metadata: Metadata, gelu: str) -> str:
    """Return the activation of the tower. gelu: the one that "GELU" means."""
    gelu_flag, silu_flag = (flag(metadata, f"use_{name}") for name in ("gelu", "silu"))
    if gelu_flag and silu_flag:
        raise ModelError(
            f"{metadata.header.path}: both clip.use_gelu and clip.use_silu are true; expected one"
        )
    return gelu if gelu_flag else "silu" if silu_flag else "quick_gelu"


def flag(metadata: Metadata, name: str, *, default: bool = False) -> bool:
    """Return a switch below "clip"."""
    value = metadata.header.metadata.get(f"clip.{name}", default)
    if not isinstance(value, bool):
        raise ModelError(
            f"{metadata.header.path}: metadata clip.{name} is {value!r}, expected true or false"
        )
    return value


def token_id(parts: Parts, text: str) -> int:
    """Return the number of a token that prompts with images or audio need."""
    if text not in parts.tokens:
        raise ModelError(
            f"the vocabulary of the language model beside {parts.metadata.header.path} has no "
            f"token {text!r}, which prompts with images or audio need. Convert the language model "
            "again from a repository whose tokenizer has it, or use --weight_loader.gguf.mmproj "
            "none to serve it alone"
        )
    return [*parts.tokens].index(text)


def row_token(parts: Parts, usual: str, stand_in: str) -> tuple[int, dict[str, str]]:
    """Return the number of the token that stands for a row of an image, and what the config says
    of it if it is not the usual one. stand_in: how tokens without a use begin. llama.cpp has no
    such token, so its converters may leave it out."""
    others = [text for text in parts.tokens if text.startswith(stand_in)]
    if usual in parts.tokens or not others:
        return token_id(parts, usual), {}
    return token_id(parts, others[-1]), {"image_token": others[-1]}


def check_language(parts: Parts, family: str, kinds: Sequence[str]) -> None:
    """Raise ModelError if the language model is of another type."""
    kind = parts.text["model_type"]
    if kind not in kinds:
        raise ModelError(
            f"{parts.metadata.header.path} is the vision tower of {family}; the language model "
            f"beside it is of the type {kind!r}. Use the file that was made for this model"
        )


def colors(header: GGUFHeader) -> dict[str, list[float]]:
    """Return the mean and the standard deviation of red, green and blue."""
    given = {}
    for name in ("image_mean", "image_std"):
        values = header.metadata.get(f"{VISION}.{name}")
        is_valid = (
            isinstance(values, list)
            and len(values) == 3
            and all(type(value) is float and math.isfinite(value) for value in values)
            and (name == "image_mean" or min(values) > 0)
        )
        if not isinstance(values, list) or not is_valid:
            raise ModelError(
                f"{header.path}: metadata {VISION}.{name} is {values!r}, expected a number for "
                "red, green and blue"
            )
        given[name] = [_shortest(value) for value in values]
    return given


def _shortest(value: float) -> float:
    """Return the number with the fewest digits that is stored as this float32."""
    stored = struct.pack("<f", value)
    numbers = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next(number for number in numbers if struct.pack("<f", number) == stored)
