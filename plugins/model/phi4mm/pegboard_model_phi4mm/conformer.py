"""The speech encoder of Phi-4-multimodal: a conformer (Gulati et al. 2020) with a learned bias for
each distance of two features (Raffel et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, LayerNorm, Linear, QKVLinear
from pegboard_model_phi4mm.sizes import AudioSizes
from pegboard_models.parameters import Parameters

EPS = 1e-5
BLOCK = 128
"""Features that are made of frames at once. All of an hour would take 30 GB."""
SPAN = 500
"""Features that attend to each other. Longer audio is cut."""


@dataclass(frozen=True)
class Names:
    """What a checkpoint calls modules."""

    up: str
    down: str
    attention: tuple[str, str, str, str]


PUBLISHED = Names("net.0.linear", "net.2", ("linear_q", "linear_k", "linear_v", "linear_out"))
OTHERS = Names("gate_up_proj", "down_proj", ("q_proj", "k_proj", "v_proj", "o_proj"))
"""Those of transformers."""


class Conformer(nn.Module):
    """mel features [frames, mel bins] → features [frames / reduction, hidden], rounded up."""

    def __init__(self, build: Build, sizes: AudioSizes, names: Names) -> None:
        super().__init__()
        build = build.alone()
        self.distance = sizes.distance
        bins = (sizes.num_bins,)
        norms = {"global_mean": bins, "global_invstd": bins}
        self.norms = Parameters(build.at("encoder_embedding"), norms)
        self.reduce = Reduction(build.at("embed"), sizes)
        table = {"bias_values.weight": (2 * sizes.distance, sizes.num_heads)}
        self.biases = Parameters(build.at("relative_attention_bias_layer"), table)
        blocks = build.at("encoders")
        self.layers = nn.ModuleList(
            Block(blocks.at(index), sizes, names) for index in range(sizes.num_layers)
        )

    def forward(self, mel: Tensor) -> Tensor:
        given = self.norms
        mel = (mel.to(given["global_mean"].dtype) - given["global_mean"]) * given["global_invstd"]
        hidden = self.reduce.all_of(mel)
        count = len(hidden)
        if count > SPAN:
            hidden = functional.pad(hidden, (0, 0, 0, -count % SPAN))
        spans = hidden.unflatten(0, (-1, min(count, SPAN)))
        bias = self.bias(spans.shape[1], hidden)
        for layer in self.layers:
            spans = layer.forward(spans, bias)
        return spans.flatten(0, 1)[:count]

    def bias(self, count: int, like: Tensor) -> Tensor:
        """Return what is added to the scores of these features, [heads, count, count]."""
        places = torch.arange(count, device=like.device)
        most = self.distance
        distances = (places - places[:, None]).clamp(-most, most - 1) + most
        return self.biases["bias_values.weight"][distances].permute(2, 0, 1)


class Reduction(nn.Module):
    """Convolutions, each of which halves frames and bins: [frames, bins] → [features, hidden]."""

    def __init__(self, build: Build, sizes: AudioSizes) -> None:
        super().__init__()
        channels = sizes.num_channels
        self.factor = sizes.reduction
        self.depthwise = [(f"conv.{i}", f"conv.{i + 1}") for i in _places(sizes.num_steps)]
        shapes: dict[str, tuple[int, ...]] = {
            "conv.0.weight": (channels, 1, 3, 3),
            "conv.0.bias": (channels,),
        }
        for each, mixing in self.depthwise:
            shapes[f"{each}.weight"] = (channels, 1, 3, 3)
            shapes[f"{mixing}.weight"] = (channels, channels, 1, 1)
            shapes[f"{each}.bias"] = (channels,)
            shapes[f"{mixing}.bias"] = (channels,)
        self.given = Parameters(build, shapes)
        width = channels * (-(-sizes.num_bins // sizes.reduction))
        self.out = Linear(build.at("out"), width, sizes.hidden_size, bias=True)

    def all_of(self, mel: Tensor) -> Tensor:
        """Reduce audio of any length in parts, each with the frames of one feature before it."""
        size = BLOCK * self.factor
        parts = [self.forward(mel[:size])]
        for start in range(size, len(mel), size):
            parts.append(self.forward(mel[start - self.factor : start + size])[1:])
        return torch.cat(parts)

    def forward(self, mel: Tensor) -> Tensor:
        given = self.given

        def convolved(rows: Tensor, name: str, **more: int) -> Tensor:
            weight = given[f"{name}.weight"]
            return functional.conv2d(rows, weight, given[f"{name}.bias"], **more)

        rows = convolved(mel[None, None], "conv.0", stride=2, padding=1).relu()
        for each, mixing in self.depthwise:
            rows = convolved(rows, each, stride=2, padding=1, groups=rows.shape[1])
            rows = convolved(rows, mixing).relu()
        features: Tensor = self.out(rows[0].transpose(0, 1).flatten(1))
        return features


def _places(num_steps: int) -> Sequence[int]:
    """Return the numbers of the convolutions of each channel, after the first convolution."""
    return range(2, 2 + 3 * (num_steps - 1), 3)


class Block(nn.Module):
    """Half a feed-forward layer, attention, a convolution, and the other half."""

    def __init__(self, build: Build, sizes: AudioSizes, names: Names) -> None:
        super().__init__()
        hidden = sizes.hidden_size
        heads = sizes.num_heads
        attention = build.at("self_attn")
        self.before = FeedForward(build.at("feed_forward_in"), sizes, names)
        self.attention_norm = LayerNorm(build.at("layer_norm_att"), hidden, EPS)
        *inner, out = names.attention
        self.qkv = QKVLinear(
            attention, hidden, heads, heads, hidden // heads, bias=True, names=tuple(inner)
        )
        self.out = Linear(attention.at(out), hidden, hidden, bias=True)
        self.convolution = Convolution(build.at("conv"), sizes)
        self.after = FeedForward(build.at("feed_forward_out"), sizes, names)
        self.norm = LayerNorm(build.at("layer_norm"), hidden, EPS)

    def forward(self, spans: Tensor, bias: Tensor) -> Tensor:
        """[spans, features, hidden] → the same. bias: [heads, features, features]."""
        count = len(spans)
        hidden = spans.flatten(0, 1)
        hidden = hidden + 0.5 * self.before.forward(hidden)
        query, key, value = (
            part.unflatten(0, (count, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(hidden))
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias[None])
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(hidden.shape))
        hidden = hidden + self.convolution.forward(hidden.view(spans.shape)).flatten(0, 1)
        hidden = self.norm(hidden + 0.5 * self.after.forward(hidden))
        return hidden.view(spans.shape)


class FeedForward(nn.Module):
    def __init__(self, build: Build, sizes: AudioSizes, names: Names) -> None:
        super().__init__()
        hidden = sizes.hidden_size
        size = sizes.intermediate_size
        self.norm = LayerNorm(build.at("layer_norm"), hidden, EPS)
        self.up = Linear(build.at(names.up), hidden, 2 * size, bias=True)
        self.down = Linear(build.at(names.down), size, hidden, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        values, gates = self.up(self.norm(hidden)).chunk(2, -1)
        rows: Tensor = self.down(values * functional.silu(gates))
        return rows


class Convolution(nn.Module):
    """A gate, and a convolution of each channel over this feature and those before it."""

    def __init__(self, build: Build, sizes: AudioSizes) -> None:
        super().__init__()
        hidden = sizes.hidden_size
        self.before = sizes.kernel - 1
        size = hidden * sizes.multiplier
        self.norm = LayerNorm(build.at("layer_norm"), hidden, EPS)
        shapes: dict[str, tuple[int, ...]] = {
            "glu.ext_pw_conv_1d.weight": (2 * hidden, hidden, 1),
            "glu.ext_pw_conv_1d.bias": (2 * hidden,),
            "glu.b1": (1, hidden, 1),
            "glu.b2": (1, hidden, 1),
            "dw_sep_conv_1d.dw_conv.weight": (size, 1, sizes.kernel),
            "dw_sep_conv_1d.dw_conv.bias": (size,),
            "dw_sep_conv_1d.pw_conv.weight": (hidden, size, 1),
            "dw_sep_conv_1d.pw_conv.bias": (hidden,),
            "ext_pw_conv_1d.weight": (hidden, hidden, 1),
            "ext_pw_conv_1d.bias": (hidden,),
        }
        self.given = Parameters(build, shapes)

    def forward(self, spans: Tensor) -> Tensor:
        given = self.given
        rows = self.norm(spans.flatten(0, 1)).view(spans.shape)
        values, gates = self.mixed(rows, "glu.ext_pw_conv_1d").chunk(2, -1)
        values = values + given["glu.b1"].flatten()
        gated = values * functional.silu(gates + given["glu.b2"].flatten())
        padded = functional.pad(gated.transpose(1, 2), (self.before, 0))
        weight = given["dw_sep_conv_1d.dw_conv.weight"]
        bias = given["dw_sep_conv_1d.dw_conv.bias"]
        rows = functional.conv1d(padded, weight, bias, groups=spans.shape[-1]).transpose(1, 2)
        rows = functional.silu(self.mixed(rows, "dw_sep_conv_1d.pw_conv"))
        return self.mixed(rows, "ext_pw_conv_1d")

    def mixed(self, rows: Tensor, name: str) -> Tensor:
        """Apply a convolution of width 1 to the channels of each row."""
        weight = self.given[f"{name}.weight"][:, :, 0]
        return functional.linear(rows, weight, self.given[f"{name}.bias"])
