"""What the model and the processor read in a config. There are two forms: the published one, and
that of transformers. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError
from pegboard_models.config_numbers import numbers, section
from pegboard_models.vision_sizes import Selection, VisionSizes

IMAGE_TOKEN = 200_010
AUDIO_TOKEN = 200_011
MERGED = 2
"""The patches of a line, and the lines, that are one row."""
VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "feature_layer": -2,
}
"""The tower, which published configs do not describe."""
AUDIO = {
    "hidden_size": 1024,
    "intermediate_size": 1536,
    "num_blocks": 24,
    "num_attention_heads": 16,
    "input_size": 80,
    "time_reduction": 8,
    "nemo_conv_channels": 1024,
    "kernel_size": 3,
    "depthwise_multiplier": 1,
    "bias_max_distance": 1000,
}
PUBLISHED = {
    "hidden_size": "attention_dim",
    "intermediate_size": "linear_units",
    "num_attention_heads": "attention_heads",
    "depthwise_separable_out_channel": "depthwise_seperable_out_channel",
}
"""Name of transformers → name in published configs."""
FIXED: Mapping[str, Any] = {
    "activation": "swish",
    "conv_activation": "swish",
    "conv_glu_type": "swish",
    "nemo_activation": "relu",
    "bias_symmetric": False,
    "chunk_size": -1,
    "downsample_rate": 1,
}
"""What is the same in all checkpoints. Others are refused."""


def is_published(config: Mapping[str, Any]) -> bool:
    """Return whether a config, and the tensors with it, have the published names."""
    return "embd_layer" in config


def vision_of(config: Mapping[str, Any]) -> tuple[VisionSizes, int]:
    """Return the sizes of the tower, and how many of its layers are used. Raises ModelError."""
    given = {**VISION, **section(config, "vision_config")}
    sizes = VisionSizes.of({**given, "model_type": "siglip_vision_model"})
    selected = {"vision_feature_layer": given["feature_layer"]}
    crop = given.get("crop_size", sizes.image_size)
    if crop != sizes.image_size or sizes.image_size % (sizes.patch_size * MERGED):
        raise ModelError(
            f"the checkpoint's vision_config has image_size={sizes.image_size}, crop_size={crop}, "
            f"patch_size={sizes.patch_size}; expected the same size twice, and a multiple of "
            f"{MERGED} patches"
        )
    return sizes, Selection.of(selected, sizes, "full").depths[0]


@dataclass(frozen=True)
class AudioSizes:
    """num_bins: mel bins. reduction: frames of a feature. num_channels: of the convolutions before
    the layers. multiplier: channels that a convolution in a layer makes of one. distance: in
    features, from which on all are alike."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_bins: int
    reduction: int
    num_channels: int
    kernel: int
    multiplier: int
    distance: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> AudioSizes:
        """Read a config of either form. Raises ModelError for what is not supported."""
        given = _audio_config(config)
        for name, expected in FIXED.items():
            if (value := given.get(name, expected)) != expected:
                raise ModelError(
                    f"the checkpoint's audio config has {name}={value!r}; supported: {expected!r}"
                )
        sizes = numbers(given, AUDIO, "audio config")
        hidden = sizes["hidden_size"]
        for name in ("ext_pw_out_channel", "depthwise_separable_out_channel"):
            if (value := given.get(name, hidden)) != hidden:
                raise ModelError(
                    f"the checkpoint's audio config has {name}={value!r}; supported: {hidden}, the "
                    "size of a feature"
                )
        reduction = sizes["time_reduction"]
        if reduction < 2 or reduction & (reduction - 1) or hidden % sizes["num_attention_heads"]:
            raise ModelError(
                f"the checkpoint's audio config has time_reduction={reduction}, hidden_size="
                f"{hidden}, num_attention_heads={sizes['num_attention_heads']}; expected a power "
                "of two, and a multiple of the heads"
            )
        return cls(
            hidden_size=hidden,
            intermediate_size=sizes["intermediate_size"],
            num_layers=sizes["num_blocks"],
            num_heads=sizes["num_attention_heads"],
            num_bins=sizes["input_size"],
            reduction=reduction,
            num_channels=sizes["nemo_conv_channels"],
            kernel=sizes["kernel_size"],
            multiplier=sizes["depthwise_multiplier"],
            distance=sizes["bias_max_distance"],
        )

    @property
    def num_steps(self) -> int:
        """The convolutions before the layers that halve the frames."""
        return self.reduction.bit_length() - 1

    def num_rows(self, num_frames: int) -> int:
        """Return the features of so many frames."""
        return -(-num_frames // self.reduction)


def _audio_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the encoder under the names of transformers."""
    if not is_published(config):
        return dict(section(config, "audio_config"))
    given = dict(section(section(config, "audio_processor"), "config"))
    values = {name: given[other] for name, other in PUBLISHED.items() if other in given}
    bias = section(given, "relative_attention_bias_args")
    if "t5_bias_max_distance" in bias:
        values["bias_max_distance"] = bias["t5_bias_max_distance"]
    values["bias_symmetric"] = bias.get("t5_bias_symmetric", False)
    channels = section(given, "nemo_conv_settings").get("conv_channels")
    if channels is not None:
        values["nemo_conv_channels"] = channels
    return {**given, **values}
