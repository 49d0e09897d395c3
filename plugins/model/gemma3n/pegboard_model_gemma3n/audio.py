"""The audio encoder of Gemma 3n, a Universal Speech Model (Zhang et al. 2023): two convolutions,
and conformer layers (Gulati et al. 2020) whose frames attend to the last few ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, Linear, Norm
from pegboard_model_gemma3n.sizes import AudioSizes, Convolution
from pegboard_models.parameters import Parameters

EPS = 1e-6
LONGEST_PERIOD = 1e4
"""The period of the slowest channel of an embedded distance, divided by 2 π."""


class AudioEncoder(nn.Module):
    """Log-mel features [frames, mel bins] of an item → features [rows, hidden]."""

    def __init__(self, build: Build, sizes: AudioSizes) -> None:
        super().__init__()
        build = build.alone()
        first, second = sizes.convolutions
        place = build.at("subsample_conv_projection")
        self.first = Subsampling(place.at("conv_0"), 1, first, sizes.group_eps)
        self.second = Subsampling(place.at("conv_1"), first.channels, second, sizes.group_eps)
        width = second.channels * sizes.bins[1]
        self.project = Linear(place.at("input_proj_linear"), width, sizes.hidden_size)
        layers = build.at("conformer")
        self.layers = nn.ModuleList(
            ConformerLayer(layers.at(index), sizes) for index in range(sizes.num_layers)
        )
        self.reduction = sizes.reduction

    def forward(self, mel: Tensor) -> Tensor:
        frames = self.second.forward(self.first.forward(mel[None]))
        hidden = self.project(frames.permute(1, 2, 0).flatten(1))
        for layer in self.layers:
            hidden = layer.forward(hidden)
        return hidden[:: self.reduction]


class Subsampling(nn.Module):
    """[channels, frames, bins] → fewer frames and bins. They are normalized with the mean and the
    deviation of all that came until then."""

    def __init__(self, build: Build, inputs: int, convolution: Convolution, eps: float) -> None:
        super().__init__()
        self.stride = convolution.stride
        self.padding = (1, 1, 0, convolution.kernel[0] - 1)
        self.eps = eps
        size = convolution.channels
        shapes: dict[str, tuple[int, ...]] = {
            "conv.weight": (size, inputs, *convolution.kernel),
            "norm.weight": (size,),
        }
        self.given = Parameters(build, shapes)

    def forward(self, frames: Tensor) -> Tensor:
        weight = self.given["conv.weight"]
        padded = functional.pad(frames.to(weight.dtype), self.padding)
        convolved = functional.conv2d(padded[None], weight, stride=self.stride)[0]
        wide = convolved.float()
        size = wide.shape[0] * wide.shape[2]
        counts = size * torch.arange(1, wide.shape[1] + 1, device=wide.device)[:, None]
        means = wide.sum((0, 2))[:, None].cumsum(0) / counts
        centered = wide - means
        variances = centered.square().sum((0, 2))[:, None].cumsum(0) / counts
        scale = self.given["norm.weight"].float()[:, None, None]
        normalized = centered * (variances + self.eps).rsqrt() * scale
        return normalized.to(convolved.dtype).relu()


class ConformerLayer(nn.Module):
    """A feed-forward block, attention, a convolution, and another feed-forward block: [frames,
    hidden] → the same."""

    def __init__(self, build: Build, sizes: AudioSizes) -> None:
        super().__init__()
        dtype = getattr(torch, build.dtype)
        limit = self.limit = min(sizes.clip, torch.finfo(dtype).max)
        self.before = FeedForward(build.at("ffw_layer_start"), sizes, limit)
        self.attention = NearAttention(build.at("attention"), sizes, limit)
        self.convolution = LightConvolution(build.at("lconv1d"), sizes, limit)
        self.after = FeedForward(build.at("ffw_layer_end"), sizes, limit)
        self.norm = Norm(build.at("norm"), sizes.hidden_size, EPS)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.attention.forward(self.before.forward(hidden))
        hidden = self.after.forward(self.convolution.forward(hidden))
        return self.norm(hidden.clamp(-self.limit, self.limit))


class FeedForward(nn.Module):
    def __init__(self, build: Build, sizes: AudioSizes, limit: float) -> None:
        super().__init__()
        size = sizes.hidden_size
        self.limit = limit
        self.residual = sizes.residual
        self.pre_norm = Norm(build.at("pre_layer_norm"), size, EPS)
        self.up = Linear(build.at("ffw_layer_1"), size, 4 * size)
        self.down = Linear(build.at("ffw_layer_2"), 4 * size, size)
        self.post_norm = Norm(build.at("post_layer_norm"), size, EPS)

    def forward(self, hidden: Tensor) -> Tensor:
        normalized = self.pre_norm(hidden.clamp(-self.limit, self.limit))
        mixed = self.down(functional.silu(self.up(normalized)))
        return hidden + self.post_norm(mixed.clamp(-self.limit, self.limit)) * self.residual


class NearAttention(nn.Module):
    """Each frame attends to those from `before` frames before it to `after` frames after it. Scores
    have a term for the distance (Dai et al. 2019) and a cap."""

    def __init__(self, build: Build, sizes: AudioSizes, limit: float) -> None:
        super().__init__()
        size = sizes.hidden_size
        self.limit = limit
        self.num_heads = sizes.num_heads
        self.before = sizes.before
        self.after = sizes.after
        self.cap = sizes.cap
        head_dim = size // sizes.num_heads
        self.scale = head_dim**-0.5 / math.log(2.0)
        self.num_channels = size
        self.pre_norm = Norm(build.at("pre_attn_norm"), size, EPS)
        inner = build.at("attn")
        self.projections = nn.ModuleList(
            Linear(inner.at(f"{name}_proj"), size, size) for name in ("q", "k", "v")
        )
        self.scales = Parameters(inner, {"per_dim_scale": (head_dim,)})
        self.distances = Linear(inner.at("relative_position_embedding.pos_proj"), size, size)
        self.post = Linear(build.at("post"), size, size)
        self.post_norm = Norm(build.at("post_norm"), size, EPS)

    def forward(self, hidden: Tensor) -> Tensor:
        normalized = self.pre_norm(hidden.clamp(-self.limit, self.limit))
        query, key, value = (
            project(normalized).unflatten(1, (self.num_heads, -1)) for project in self.projections
        )
        query = query * self.scale * functional.softplus(self.scales["per_dim_scale"])
        span = self.before + self.after + 1
        near_keys, near_values = (
            functional.pad(part, (0, 0, 0, 0, self.before, self.after)).unfold(0, span, 1)
            for part in (key, value)
        )
        distances = self.distances(self.waves(query)).unflatten(1, (self.num_heads, -1))
        scores = query[:, :, None] @ near_keys + query[:, :, None] @ distances.permute(1, 2, 0)
        scores = torch.tanh(scores[:, :, 0] / self.cap) * self.cap
        places = torch.arange(len(hidden), device=hidden.device)[:, None] - self.before
        places = places + torch.arange(span, device=hidden.device)
        is_outside = (places < 0) | (places >= len(hidden))
        scores = scores.float().masked_fill(is_outside[:, None], -math.inf)
        weights = scores.softmax(-1).to(value.dtype)
        mixed = (near_values @ weights[..., None])[..., 0].flatten(1)
        attended = self.post(mixed).clamp(-self.limit, self.limit)
        return hidden + self.post_norm(attended)

    def waves(self, like: Tensor) -> Tensor:
        """Return the sines and cosines of each distance, from `before` down to -`after`: [span,
        hidden]."""
        count = self.num_channels // 2
        step = math.log(LONGEST_PERIOD) / max(count - 1, 1)
        rates = torch.exp(torch.arange(count, device=like.device) * -step)
        distances = torch.arange(self.before, -self.after - 1, -1, device=like.device)
        angles = distances[:, None] * rates
        return torch.cat([angles.sin(), angles.cos()], 1).to(like.dtype)


class LightConvolution(nn.Module):
    """A gate, and a convolution of each channel with the frames before."""

    def __init__(self, build: Build, sizes: AudioSizes, limit: float) -> None:
        super().__init__()
        size = sizes.hidden_size
        self.limit = limit
        self.padding = (sizes.kernel - 1, 0)
        self.pre_norm = Norm(build.at("pre_layer_norm"), size, sizes.eps)
        self.start = Linear(build.at("linear_start"), size, 2 * size)
        shape = (size, 1, sizes.kernel)
        self.given = Parameters(build, {"depthwise_conv1d.weight": shape})
        self.norm = Norm(build.at("conv_norm"), size, sizes.eps)
        self.end = Linear(build.at("linear_end"), size, size)

    def forward(self, hidden: Tensor) -> Tensor:
        gated = functional.glu(self.start(self.pre_norm(hidden)), 1)
        padded = functional.pad(gated.T, self.padding)
        weight = self.given["depthwise_conv1d.weight"]
        convolved = functional.conv1d(padded, weight, groups=len(weight)).T
        normalized = self.norm(convolved.clamp(-self.limit, self.limit).contiguous())
        return hidden + self.end(functional.silu(normalized))
