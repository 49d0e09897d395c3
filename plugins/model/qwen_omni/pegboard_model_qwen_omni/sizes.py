"""What configs of Qwen-Omni say. This module does not import torch, because processors read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError
from pegboard_models.whisper_sizes import LARGE, WhisperSizes

PARTS = ("model", "lm_head", "visual", "audio_tower")
"""The modules of a thinker."""
AUDIO_TOKEN = 151646
VISION_TOKENS = (151655, 151656)
"""Of an image and of a video, if the config does not say."""
RATE = 25
"""Positions of a second, if the config does not say."""
THETA = 1_000_000.0
"""The base of the rotary embedding, if the config does not say."""
WINDOW = {"n_window": 100, "output_dim": 3584}
"""Of the audio encoder of Qwen2.5-Omni, if the config does not say."""

CHUNK = {
    "n_window": 50,
    "n_window_infer": 800,
    "downsample_hidden_size": 480,
    "conv_chunksize": 500,
    "output_dim": 3584,
}
"""Of the audio encoder of Qwen3-Omni, if the config does not say."""
CHUNK_ROWS = 13
"""Rows of a whole chunk. Transformers and vLLM count with this number."""


@dataclass(frozen=True)
class WindowedSizes:
    """frames: mel frames of a window. outer: of the rows that the encoder makes."""

    encoder: WhisperSizes
    frames: int
    outer: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> WindowedSizes:
        """Read the audio_config of a thinker. Raises ModelError for wrong values."""
        given = part_of(config, "audio_config")
        encoder = encoder_sizes(given)
        values = {**WINDOW, **given}
        check_audio_numbers(values, WINDOW)
        half = values["n_window"]
        if half > encoder.max_positions:
            raise wrong("n_window", half, f"at most max_source_positions={encoder.max_positions}")
        return cls(encoder, 2 * half, values["output_dim"])


@dataclass(frozen=True)
class ChunkedSizes:
    """frames: mel frames of a chunk. chunks: those of a window, in which rows see each other.
    channels: of the convolutions. batch: the most chunks that are convolved at once. outer: of the
    rows that the encoder makes."""

    encoder: WhisperSizes
    frames: int
    chunks: int
    channels: int
    batch: int
    outer: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ChunkedSizes:
        """Read the audio_config of a thinker. Raises ModelError for wrong values."""
        given = part_of(config, "audio_config")
        encoder = encoder_sizes(given)
        values = {**CHUNK, **given}
        check_audio_numbers(values, CHUNK)
        half = values["n_window"]
        frames = 2 * half
        if num_rows(frames) != CHUNK_ROWS:
            raise wrong("n_window", half, f"a number whose chunks have {CHUNK_ROWS} rows: 49 to 52")
        if encoder.max_positions < CHUNK_ROWS:
            raise wrong("max_source_positions", encoder.max_positions, f"at least {CHUNK_ROWS}")
        window = values["n_window_infer"]
        if window < frames:
            raise wrong("n_window_infer", window, f"at least {frames}, the frames of a chunk")
        return cls(
            encoder=encoder,
            frames=frames,
            chunks=window // frames,
            channels=values["downsample_hidden_size"],
            batch=values["conv_chunksize"],
            outer=values["output_dim"],
        )


def num_rows(frames: int) -> int:
    """Return the rows of a chunk: three convolutions keep every second frame."""
    return -(-frames // 8)


def encoder_sizes(given: Mapping[str, Any]) -> WhisperSizes:
    """Return the sizes of the layers of an audio encoder. given: its config. Raises ModelError."""
    encoder = WhisperSizes.of(given, LARGE)
    if encoder.hidden_size % 2:
        raise wrong("d_model", encoder.hidden_size, "an even number")
    return encoder


def check_audio_numbers(values: Mapping[str, Any], names: Mapping[str, int]) -> None:
    """Raise ModelError for values that are not whole numbers from 1 on."""
    for name in names:
        if type(values[name]) is not int or values[name] < 1:
            raise wrong(name, values[name], "a whole number from 1 on")


def wrong(name: str, value: object, expected: str) -> ModelError:
    """Return the error of a value of the audio_config."""
    return ModelError(
        f"the checkpoint's audio_config has {name}={value!r}; expected {expected}. Correct its "
        "config"
    )


def part_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the config of a part, {} if there is none. Raises ModelError if it is wrong."""
    part = config.get(name)
    if part is not None and not isinstance(part, Mapping):
        raise ModelError(f"the checkpoint's config has {name}={part!r}; expected an object")
    return part or {}


def thinker_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the thinker. config: its own, or that of a whole checkpoint, whose
    text_config counts. Raises ModelError if it is wrong."""
    thinker = part_of(config, "thinker_config")
    if not thinker:
        return dict(config)
    text = config.get("text_config") or thinker.get("text_config")
    return {**thinker, "text_config": text}


def with_whole_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with what its text_config leaves unsaid. Only the thinker's config says
    whether embeddings are tied. Raises ModelError if the text_config is wrong."""
    text = dict(part_of(config, "text_config"))
    is_tied = bool(config.get("tie_word_embeddings"))
    text["rope_theta"] = text.get("rope_theta") or THETA
    text["tie_word_embeddings"] = is_tied
    return {**config, "text_config": text, "tie_word_embeddings": is_tied}


def rate_of(config: Mapping[str, Any]) -> float:
    """Return the positions of a second. Raises ModelError if it is no number above 0."""
    rate = config.get("position_id_per_seconds", RATE)
    if type(rate) not in (int, float) or not 0 < rate < float("inf"):
        raise ModelError(
            f"the checkpoint's config has position_id_per_seconds={rate!r}; expected a number above"
            " 0. Correct it"
        )
    return float(rate)
