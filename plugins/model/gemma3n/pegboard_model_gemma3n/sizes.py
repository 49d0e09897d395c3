"""The sizes of the audio encoder and the vision tower, from a checkpoint's config. This module does
not import torch, because the processor reads it, too."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError
from pegboard_models.config_numbers import numbers

TOKENS = {"image": 262145, "boi": 255999, "eoi": 262144, "audio": 262273, "boa": 256000} | {
    "eoa": 262272
}
"""The tokens of configs that do not have them, as in transformers."""
SOFT_TOKENS = {"audio_soft_tokens_per_image": 188, "vision_soft_tokens_per_image": 256}
VISION_SIDE = 16
"""Rows of an image beside and below each other."""
VISION_WIDTH = 2048
ARCHITECTURE = "mobilenetv5_300m_enc"
AUDIO = {
    "input_feat_size": 128,
    "hidden_size": 1536,
    "conf_num_attention_heads": 8,
    "conf_num_hidden_layers": 12,
    "conf_attention_chunk_size": 12,
    "conf_conv_kernel_size": 5,
    "conf_reduction_factor": 4,
}
CONTEXT = {"conf_attention_context_left": 13, "conf_attention_context_right": 0}
FACTORS = {
    "rms_norm_eps": 1e-6,
    "gradient_clipping": 1e10,
    "conf_attention_logit_cap": 50.0,
    "conf_residual_weight": 0.5,
    "sscp_conv_group_norm_eps": 1e-3,
}
CONVOLUTIONS = {
    "sscp_conv_channel_size": [128, 32],
    "sscp_conv_kernel_size": [[3, 3], [3, 3]],
    "sscp_conv_stride_size": [[2, 2], [2, 2]],
}


def reads(config: Mapping[str, Any], names: Collection[str], part: str) -> bool:
    """Return whether a checkpoint has this part, "vision" or "audio". names: of its tensors; if
    none are known, its config decides."""
    if not names:
        return config.get(f"{part}_config") is not None
    place = f"embed_{part}."
    return any(name.removeprefix("model.").startswith(place) for name in names)


def part_of(config: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    """Return the config of a part. Values that are null count as absent. Raises ModelError."""
    given = config.get(f"{part}_config") or {}
    if not isinstance(given, Mapping):
        raise ModelError(
            f"the checkpoint's config has {part}_config={given!r}; expected an object. Correct it"
        )
    return {name: value for name, value in given.items() if value is not None}


def soft_tokens(config: Mapping[str, Any], name: str) -> int:
    """Return how many tokens an item has. Raises ModelError."""
    return numbers(config, SOFT_TOKENS, "config")[name]


@dataclass(frozen=True)
class Embedded:
    """What becomes an embedding of the language model. size: channels. start: the first token that
    has an embedding in the part's own table. count: of such tokens."""

    size: int
    eps: float
    start: int
    count: int

    @classmethod
    def of(cls, config: Mapping[str, Any], part: str) -> Embedded:
        """Read a part, "vision" or "audio". Raises ModelError."""
        given = part_of(config, part)
        default = {"vision": (VISION_WIDTH, 262_144), "audio": (AUDIO["hidden_size"], 262_272)}
        size, start = default[part]
        names = {"hidden_size": size, "vocab_offset": start, "vocab_size": 128}
        values = numbers(given, names, f"{part}_config")
        eps = factors(given, {"rms_norm_eps": 1e-6}, f"{part}_config")["rms_norm_eps"]
        return cls(values["hidden_size"], eps, values["vocab_offset"], values["vocab_size"])

    def check(self, part: str, stop: int) -> None:
        """Raise ModelError if tokens from `start` to `stop` lack an embedding."""
        if not self.start < stop <= self.start + self.count:
            raise ModelError(
                f"the checkpoint's {part}_config has embeddings of the {self.count} tokens from "
                f"vocab_offset={self.start} on; expected those up to {stop - 1}. Correct vocab_size"
            )


def factors(
    config: Mapping[str, Any], defaults: Mapping[str, float], what: str
) -> dict[str, float]:
    """Return the numbers above 0 of a config. what: its name, for errors. Raises ModelError."""
    values = {name: config.get(name, default) for name, default in defaults.items()}
    for name, value in values.items():
        if type(value) not in (int, float) or not value > 0:
            raise ModelError(
                f"the checkpoint's {what} has {name}={value!r}; expected a number above 0. "
                "Correct it"
            )
    return {name: float(value) for name, value in values.items()}


@dataclass(frozen=True)
class Convolution:
    """channels: of the output. kernel, stride: in frames and in bins of a frame."""

    channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]

    def num_frames(self, count: int) -> int:
        """Return the frames of the output. As many frames follow the input as the kernel covers
        after the first one."""
        return (count - 1) // self.stride[0] + 1

    def num_bins(self, count: int) -> int:
        """Return the bins of an output's frame. One bin is added at each end."""
        return (count + 2 - self.kernel[1]) // self.stride[1] + 1


@dataclass(frozen=True)
class AudioSizes:
    """before, after: frames that a frame attends to, besides itself. cap: of attention's scores.
    clip: the largest magnitude between blocks. residual: the share of a feed-forward block that is
    added. reduction: features for each row."""

    num_bins: int
    hidden_size: int
    num_heads: int
    num_layers: int
    kernel: int
    reduction: int
    before: int
    after: int
    eps: float
    clip: float
    cap: float
    residual: float
    group_eps: float
    convolutions: tuple[Convolution, Convolution]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> AudioSizes:
        """Read the audio_config of a config. Raises ModelError."""
        given = part_of(config, "audio")
        what = "audio_config"
        values = numbers(given, AUDIO, what)
        context = {name: given.get(name, default) for name, default in CONTEXT.items()}
        for name, value in context.items():
            if type(value) is not int or value < 0:
                raise ModelError(
                    f"the checkpoint's {what} has {name}={value!r}; expected a whole number from 0 "
                    "on. Correct it"
                )
        hidden = values["hidden_size"]
        heads = values["conf_num_attention_heads"]
        if hidden % heads or hidden % 2:
            raise ModelError(
                f"the checkpoint's {what} has hidden_size={hidden}; expected an even multiple of "
                f"conf_num_attention_heads={heads}. Correct it"
            )
        numbers_of = factors(given, FACTORS, what)
        sizes = cls(
            num_bins=values["input_feat_size"],
            hidden_size=hidden,
            num_heads=heads,
            num_layers=values["conf_num_hidden_layers"],
            kernel=values["conf_conv_kernel_size"],
            reduction=values["conf_reduction_factor"],
            before=max(0, context["conf_attention_context_left"] - 1),
            after=context["conf_attention_context_right"],
            eps=numbers_of["rms_norm_eps"],
            clip=numbers_of["gradient_clipping"],
            cap=numbers_of["conf_attention_logit_cap"],
            residual=numbers_of["conf_residual_weight"],
            group_eps=numbers_of["sscp_conv_group_norm_eps"],
            convolutions=convolutions_of(given),
        )
        if sizes.bins[-1] < 1:
            raise ModelError(
                f"the checkpoint's {what} has input_feat_size={sizes.num_bins}, which is less than "
                "its convolutions take. Correct it"
            )
        return sizes

    @property
    def bins(self) -> tuple[int, int]:
        """The bins of a frame after each convolution."""
        first = self.convolutions[0].num_bins(self.num_bins)
        return first, self.convolutions[1].num_bins(first)

    def num_rows(self, num_frames: int) -> int:
        """Return how many rows are made of these frames."""
        for convolution in self.convolutions:
            num_frames = convolution.num_frames(num_frames)
        return -(-num_frames // self.reduction)


def convolutions_of(config: Mapping[str, Any]) -> tuple[Convolution, Convolution]:
    """Read both convolutions of an audio_config. Raises ModelError."""
    values = {name: config.get(name, default) for name, default in CONVOLUTIONS.items()}
    try:
        first, second = (
            Convolution(channels, (kernel[0], kernel[1]), (stride[0], stride[1]))
            for channels, kernel, stride in zip(*values.values(), strict=True)
        )
        plain = [n for each in (first, second) for n in (each.channels, *each.kernel, *each.stride)]
    except (IndexError, KeyError, TypeError, ValueError):
        plain = [0]
    if any(type(number) is not int or number < 1 for number in plain):
        raise ModelError(
            f"the checkpoint's audio_config has {values}; expected the channels of two "
            "convolutions, and two whole numbers for the kernel and the stride of each. Correct it"
        )
    return first, second


def check_vision(config: Mapping[str, Any]) -> None:
    """Raise ModelError for a vision_config of another tower."""
    given = part_of(config, "vision")
    expected = {"architecture": ARCHITECTURE, "hidden_size": VISION_WIDTH, "model_args": {}}
    for name, value in expected.items():
        if given.get(name, value) != value:
            raise ModelError(
                f"the checkpoint's vision_config has {name}={given[name]!r}; the plugin has the "
                f"tower with {name}={value!r}"
            )
    if (count := soft_tokens(config, "vision_soft_tokens_per_image")) != VISION_SIDE**2:
        raise ModelError(
            f"the checkpoint's config has vision_soft_tokens_per_image={count}; the vision tower "
            f"makes {VISION_SIDE**2} rows. Correct it"
        )
