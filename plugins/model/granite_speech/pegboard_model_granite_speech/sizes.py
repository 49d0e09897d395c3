"""The sizes of Granite Speech, from a checkpoint's config. This module does not import torch,
because the processor reads it, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError
from pegboard_models.config_numbers import numbers

AUDIO_TOKEN = 49155
ENCODER = {
    "input_dim": 160,
    "num_layers": 10,
    "hidden_dim": 1024,
    "feedforward_mult": 4,
    "num_heads": 8,
    "output_dim": 42,
    "context_size": 200,
    "max_pos_emb": 512,
    "conv_kernel_size": 15,
    "conv_expansion_factor": 2,
}
WINDOWS = {"window_size": 15, "downsample_rate": 5}


@dataclass(frozen=True)
class EncoderSizes:
    """head_dim: channels of a head. context: features that attend to each other. max_distance: the
    largest distance of two features that has an embedding. num_labels: of the layer in the middle.
    """

    input_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    head_dim: int
    num_labels: int
    context: int
    max_distance: int
    kernel: int
    num_channels: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> EncoderSizes:
        """Read an encoder_config. Raises ModelError."""
        given = numbers(config, ENCODER, "encoder_config")
        hidden = given["hidden_dim"]
        head = {"dim_head": max(1, hidden // given["num_heads"])}
        present = {name: value for name, value in config.items() if value is not None}
        if given["context_size"] > given["max_pos_emb"]:
            raise ModelError(
                f"the checkpoint's encoder_config has context_size={given['context_size']}; "
                f"expected at most max_pos_emb={given['max_pos_emb']}. Correct it"
            )
        return cls(
            input_size=given["input_dim"],
            num_layers=given["num_layers"],
            hidden_size=hidden,
            intermediate_size=hidden * given["feedforward_mult"],
            num_heads=given["num_heads"],
            head_dim=numbers(present, head, "encoder_config")["dim_head"],
            num_labels=given["output_dim"],
            context=given["context_size"],
            max_distance=given["max_pos_emb"],
            kernel=given["conv_kernel_size"],
            num_channels=hidden * given["conv_expansion_factor"],
        )


@dataclass(frozen=True)
class Windows:
    """size: features of a window. rows: that are made of each."""

    size: int
    rows: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Windows:
        """Read window_size and downsample_rate. Raises ModelError."""
        given = numbers(config, WINDOWS, "config")
        size = given["window_size"]
        rate = given["downsample_rate"]
        if size % rate:
            raise ModelError(
                f"the checkpoint's config has window_size={size}; expected a multiple of "
                f"downsample_rate={rate}. Correct it"
            )
        return cls(size, size // rate)

    def num_rows(self, num_features: int) -> int:
        """Return how many rows an item with these features has."""
        return -(-num_features // self.size) * self.rows
