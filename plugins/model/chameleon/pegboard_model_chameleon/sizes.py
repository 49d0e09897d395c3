"""What the model and the processor read in a config. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegboard.errors import ModelError
from pegboard_models.config_numbers import numbers

START = "IMGIMG"
"""How the names of the tokens of images begin."""
DIGITS = str.maketrans("ABCDEFGHIJ", "0123456789")
NUMBERS = {
    "embed_dim": 256,
    "num_embeddings": 8192,
    "latent_channels": 256,
    "resolution": 512,
    "in_channels": 3,
    "base_channels": 128,
    "num_res_blocks": 2,
}
MULTIPLIERS = (1, 1, 2, 2, 4)
GROUPS = 32
"""Of channels, in the norms."""


@dataclass(frozen=True)
class EncoderSizes:
    """channels: after each level, the first one of which sees `resolution` pixels a side; every
    next one sees half of them. num_blocks: of a level. attention: resolutions of the levels whose
    blocks attend. attends: whether the last blocks do."""

    channels: tuple[int, ...]
    base: int
    num_blocks: int
    resolution: int
    attention: tuple[int, ...]
    attends: bool
    latent: int
    width: int
    num_codes: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> EncoderSizes:
        """Read a vq_config. Raises ModelError."""
        given = numbers(config, NUMBERS, "vq_config")
        factors = config.get("channel_multiplier", MULTIPLIERS)
        if not is_numbers(factors) or not factors:
            raise wrong("channel_multiplier", factors, "whole numbers from 1 on")
        channels = tuple(given["base_channels"] * factor for factor in factors)
        if given["base_channels"] % GROUPS:
            raise wrong("base_channels", given["base_channels"], f"a multiple of {GROUPS}")
        if given["resolution"] % 2 ** (len(channels) - 1):
            raise wrong("resolution", given["resolution"], f"{len(channels) - 1} times even")
        if given["in_channels"] != NUMBERS["in_channels"]:
            raise wrong("in_channels", given["in_channels"], "3, the channels of images")
        if config.get("double_latent"):
            raise wrong("double_latent", config["double_latent"], "false")
        kind = config.get("attn_type", "vanilla")
        if kind not in ("vanilla", "none", None):
            raise wrong("attn_type", kind, "'vanilla' or 'none'")
        places = config.get("attn_resolutions") or ()
        if not is_numbers(places):
            raise wrong("attn_resolutions", places, "whole numbers from 1 on, or null")
        return cls(
            channels=channels,
            base=given["base_channels"],
            num_blocks=given["num_res_blocks"],
            resolution=given["resolution"],
            attention=tuple(places) if kind == "vanilla" else (),
            attends=kind == "vanilla",
            latent=given["latent_channels"],
            width=given["embed_dim"],
            num_codes=given["num_embeddings"],
        )

    @property
    def num_rows(self) -> int:
        """The codes of an image."""
        return (self.resolution // 2 ** (len(self.channels) - 1)) ** 2


def is_numbers(values: Any) -> bool:
    """Return whether this is a list of whole numbers from 1 on."""
    return isinstance(values, list | tuple) and all(
        type(value) is int and value > 0 for value in values
    )


def wrong(name: str, value: Any, expected: str) -> ModelError:
    """Return the error for a value of a vq_config."""
    return ModelError(
        f"the checkpoint's vq_config has {name}={value!r}; expected {expected}. Correct it"
    )


def vocabulary_of(config: Mapping[str, Any]) -> Mapping[str, int]:
    """Return the tokens by name. Raises ModelError."""
    tokens = config.get("vocabulary_map")
    if not isinstance(tokens, Mapping) or not all(type(token) is int for token in tokens.values()):
        raise ModelError(
            "the checkpoint's config has no vocabulary_map; expected the id of each token by its "
            "name. Use the config.json of the model's repository"
        )
    return tokens


def image_tokens(config: Mapping[str, Any]) -> np.ndarray:
    """Return the tokens of the codes, int64 [codes]. The name of a token has the number of its
    code, in letters from A to J, and one more letter. Raises ModelError if a code has no token."""
    count = numbers(config.get("vq_config") or {}, NUMBERS, "vq_config")["num_embeddings"]
    tokens = np.full(count, -1, np.int64)
    for name, token in vocabulary_of(config).items():
        number = name[len(START) : -1].translate(DIGITS) if name.startswith(START) else ""
        if number.isascii() and number.isdigit() and int(number) < count:
            tokens[int(number)] = token
    if (missing := np.flatnonzero(tokens < 0)).size:
        raise ModelError(
            f"the checkpoint's vocabulary_map has no token for code {missing[0]} of images, of "
            f"which there are {count}. Use the config.json of the model's repository"
        )
    return tokens


def hidden_tokens(config: Mapping[str, Any], vocab_size: int) -> list[int]:
    """Return all tokens of images, which are never chosen. Raises ModelError for ids that are not
    below vocab_size."""
    tokens = sorted(id for name, id in vocabulary_of(config).items() if name.startswith(START))
    if tokens and not 0 <= tokens[0] <= tokens[-1] < vocab_size:
        raise ModelError(
            f"the checkpoint's vocabulary_map has tokens of images from {tokens[0]} to "
            f"{tokens[-1]}; expected ids below vocab_size={vocab_size}. Correct its config"
        )
    return tokens
