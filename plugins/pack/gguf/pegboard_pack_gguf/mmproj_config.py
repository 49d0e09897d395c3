"""Makes the config of a model that reads images of the metadata of its vision tower and the config
of its language model. Standard library only."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pegboard.errors import ModelError
from pegboard_pack_gguf.header import GGUFHeader
from pegboard_pack_gguf.metadata import Metadata

VISION = "clip.vision"
GEMMA_SCALE = 4
"""The patches of a line that are averaged, if the file does not say."""
IDEFICS_TILES = 4
"""How many tiles of the tower's size a side of an image may have, if the file does not say."""
RESERVED = "<|reserved_special_token_"
UNKNOWN = "<unk>"
UNUSED = "<unused"
"""Beginnings of tokens that no text has: those of Llama 3, of Llama 2 and of Gemma 3."""

_KNOWN = {
    "clip.has_audio_encoder",
    "clip.has_llava_projector",
    "clip.has_text_encoder",
    "clip.has_vision_encoder",
    "clip.projector_type",
    "clip.use_gelu",
    "clip.use_silu",
    "clip.vision.attention.head_count",
    "clip.vision.attention.layer_norm_epsilon",
    "clip.vision.block_count",
    "clip.vision.embedding_length",
    "clip.vision.feed_forward_length",
    "clip.vision.image_mean",
    "clip.vision.image_size",
    "clip.vision.image_std",
    "clip.vision.patch_size",
    "clip.vision.projection_dim",
    "clip.vision.projector_type",
}
_OF_KIND = {
    "mlp": {"clip.vision.feature_layer"},
    "idefics3": {"clip.vision.projector.scale_factor", "clip.vision.preproc_image_size"},
    "gemma3": {"clip.vision.projector.scale_factor"},
}
"""The keys that are read, beyond those of all files."""


def config_of(
    kind: str, metadata: Metadata, text: Mapping[str, Any], tokens: Sequence[str]
) -> dict[str, Any]:
    """Return the config of a model. kind: of its projector. metadata: below `VISION`. text: the
    config of the language model. tokens: its vocabulary. Raises ModelError."""
    values = metadata.header.metadata
    path = metadata.header.path
    for name, expected in (
        ("vision_encoder", True),
        ("audio_encoder", False),
        ("text_encoder", False),
    ):
        if values.get(f"clip.has_{name}", expected) is not expected:
            raise ModelError(
                f"{path} has clip.has_{name} {values[f'clip.has_{name}']!r}; expected {expected}"
            )
    known = _KNOWN | _OF_KIND[kind]
    unknown = sorted(key for key in values if key.startswith("clip.") and key not in known)
    if unknown:
        raise ModelError(
            f"{path}: metadata {', '.join(unknown)} is not supported with the projector {kind!r}"
        )
    vision = _vision_config(metadata)
    ids = {name: text[name] for name in text if name.endswith("_token_id")}
    config = {
        "text_config": dict(text),
        "vision_config": vision,
        "tie_word_embeddings": text["tie_word_embeddings"],
        **ids,
    }
    return config | _KINDS[kind](metadata, config, tokens)


def _vision_config(metadata: Metadata) -> dict[str, Any]:
    """Return the sizes of the tower."""
    size = metadata.count("image_size")
    patch = metadata.count("patch_size")
    if size % patch:
        raise metadata.fail("image_size", f"is {size}, expected a multiple of patch_size {patch}")
    return {
        "hidden_size": metadata.count("embedding_length"),
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": metadata.count("attention.head_count"),
        "image_size": size,
        "patch_size": patch,
        "layer_norm_eps": metadata.number("attention.layer_norm_epsilon"),
    }


def _activation(metadata: Metadata, gelu: str) -> str:
    """Return the activation of the tower. gelu: the one that "GELU" means."""
    flags = []
    for name in ("use_gelu", "use_silu"):
        flag = metadata.header.metadata.get(f"clip.{name}", False)
        if not isinstance(flag, bool):
            raise ModelError(
                f"{metadata.header.path}: metadata clip.{name} is {flag!r}, expected true or false"
            )
        flags.append(flag)
    if all(flags):
        raise ModelError(
            f"{metadata.header.path}: both clip.use_gelu and clip.use_silu are true; expected one"
        )
    return gelu if flags[0] else "silu" if flags[1] else "quick_gelu"


def _llava(metadata: Metadata, config: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """LLaVA 1.5. Its converter leaves out the layers of the tower after the last one that counts.
    Without a list of layers, this is the last one of the file."""
    count = config["vision_config"]["num_hidden_layers"]
    layers = metadata.get("feature_layer")
    chosen = [count] if layers is None else layers
    if (
        not isinstance(chosen, list)
        or not chosen
        or not all(type(layer) is int and 0 <= layer <= count for layer in chosen)
    ):
        raise metadata.fail("feature_layer", f"is {layers!r}, expected numbers from 0 to {count}")
    unused = RESERVED if any(text.startswith(RESERVED) for text in tokens) else UNKNOWN
    token, named = _row_token(metadata, tokens, "<image>", unused)
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "vision_config": {
            **config["vision_config"],
            "model_type": "clip_vision_model",
            "hidden_act": _activation(metadata, "gelu"),
        },
        "vision_feature_layer": chosen[0] if len(chosen) == 1 else chosen,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "image_token_id": token,
        **named,
    }


def _idefics3(
    metadata: Metadata, config: Mapping[str, Any], tokens: Sequence[str]
) -> dict[str, Any]:
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "vision_config": {
            **config["vision_config"],
            "model_type": "idefics3_vision",
            "hidden_act": _activation(metadata, "gelu_pytorch_tanh"),
        },
        "scale_factor": metadata.count("projector.scale_factor"),
        "image_token_id": _token_id(metadata, tokens, "<image>"),
    }


def _gemma3(metadata: Metadata, config: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    vision = config["vision_config"]
    kind = config["text_config"]["model_type"]
    if kind != "gemma3_text":
        raise ModelError(
            f"{metadata.header.path} is the vision tower of Gemma 3; the language model beside it "
            f"is of the type {kind!r}"
        )
    scale = metadata.count("projector.scale_factor", GEMMA_SCALE)
    grid = vision["image_size"] // vision["patch_size"]
    if grid % scale:
        raise metadata.fail(
            "projector.scale_factor", f"is {scale}, expected a divisor of {grid} patches a side"
        )
    token, named = _row_token(metadata, tokens, "<image_soft_token>", UNUSED)
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "vision_config": {
            **vision,
            "model_type": "siglip_vision_model",
            "hidden_act": _activation(metadata, "gelu_pytorch_tanh"),
        },
        "mm_tokens_per_image": (grid // scale) ** 2,
        "boi_token_index": _token_id(metadata, tokens, "<start_of_image>"),
        "eoi_token_index": _token_id(metadata, tokens, "<end_of_image>"),
        "image_token_index": token,
        **named,
    }


_KINDS = {"mlp": _llava, "idefics3": _idefics3, "gemma3": _gemma3}


def _token_id(metadata: Metadata, tokens: Sequence[str], text: str) -> int:
    """Return the number of a token that prompts with images need."""
    if text not in tokens:
        raise ModelError(
            f"the vocabulary of the language model beside {metadata.header.path} has no token "
            f"{text!r}, which prompts with images need. Convert the language model again from a "
            "repository whose tokenizer has it, or use --weight_loader.gguf.mmproj none to serve "
            "it alone"
        )
    return [*tokens].index(text)


def _row_token(
    metadata: Metadata, tokens: Sequence[str], usual: str, stand_in: str
) -> tuple[int, dict[str, str]]:
    """Return the number of the token that stands for a row of an image, and what the config says
    of it if it is not the usual one. stand_in: how tokens without a use begin. llama.cpp has no
    such token, so its converters may leave it out."""
    others = [text for text in tokens if text.startswith(stand_in)]
    if usual in tokens or not others:
        return _token_id(metadata, tokens, usual), {}
    return _token_id(metadata, tokens, others[-1]), {"image_token": others[-1]}


def _shortest(value: float) -> float:
    """Return the number with the fewest digits that is stored as this float32."""
    stored = struct.pack("<f", value)
    numbers = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next(number for number in numbers if struct.pack("<f", number) == stored)


def _colors(header: GGUFHeader) -> dict[str, list[float]]:
    """Return the mean and the standard deviation of red, green and blue."""
    colors = {}
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
        colors[name] = [_shortest(value) for value in values]
    return colors


def _clip_images(config: Mapping[str, Any], header: GGUFHeader) -> dict[str, Any]:
    size = config["vision_config"]["image_size"]
    return {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": size},
        "crop_size": {"height": size, "width": size},
        **_colors(header),
    }


def _idefics3_images(config: Mapping[str, Any], header: GGUFHeader) -> dict[str, Any]:
    size = config["vision_config"]["image_size"]
    longest = Metadata(header, VISION).count("preproc_image_size", IDEFICS_TILES * size)
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": longest},
        "max_image_size": {"longest_edge": size},
        **_colors(header),
    }


def _gemma3_images(config: Mapping[str, Any], header: GGUFHeader) -> dict[str, Any]:
    size = config["vision_config"]["image_size"]
    return {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": size, "width": size},
        **_colors(header),
    }


PROCESSORS: Mapping[str, Callable[[Mapping[str, Any], GGUFHeader], dict[str, Any]]] = {
    "mlp": _clip_images,
    "idefics3": _idefics3_images,
    "gemma3": _gemma3_images,
}
"""The preprocessor_config.json that the model has on Hugging Face, by the kind of the projector:
how images become pixels. What it does not say has transformers' defaults."""
