"""Vision towers: CLIP (Radford et al. 2021) and SigLIP (Zhai et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.errors import ModelError
from pegboard.layers import Build, LayerNorm, Linear, QKVLinear
from pegboard_models.parameters import Parameters
from pegboard_models.vision_sizes import Selection, VisionSizes


def quick_gelu(x: Tensor) -> Tensor:
    """x · sigmoid(1.702 x), an approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu": functional.relu,
    "silu": functional.silu,
}
"""Activations of towers and projectors, by their Hugging Face names."""


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """Return an activation. Raises ModelError if its name is unknown."""
    if name not in ACTIVATIONS:
        raise ModelError(f"unknown activation {name!r}; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class VisionTower(nn.Module):
    """(images [3, size, size]) → features [images, positions, width]. The layers after the last
    selected one are not built."""

    def __init__(self, build: Build, sizes: VisionSizes, selection: Selection) -> None:
        super().__init__()
        build = build.alone()
        if build.has(build.at("vision_model").path):
            build = build.at("vision_model")
        self.depths = selection.depths
        self.first = int(selection.drops_first)
        self.width = sizes.hidden_size * len(self.depths)
        self.patches = Patches(build.at("embeddings"), sizes)
        self.pre_norm = (
            LayerNorm(build.at("pre_layrnorm"), sizes.hidden_size, sizes.eps)
            if sizes.is_clip
            else None
        )
        layers = build.at("encoder").at("layers")
        self.layers = nn.ModuleList(
            VisionLayer(layers.at(index), sizes) for index in range(max(self.depths))
        )

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        hidden = self.patches.forward(torch.stack([*images]))
        count, positions, _ = hidden.shape
        rows = hidden.flatten(0, 1)
        if self.pre_norm is not None:
            rows = self.pre_norm(rows)
        states = [rows]
        for layer in self.layers:
            states.append(layer.forward(states[-1], count))
        features = torch.cat([states[depth] for depth in self.depths], 1)
        return features.view(count, positions, -1)[:, self.first :]


class Patches(nn.Module):
    """(pixels [items, 3, size, size]) → the vectors of the class token, if any, and of the patches
    [items, positions, hidden]."""

    def __init__(self, build: Build, sizes: VisionSizes) -> None:
        super().__init__()
        self.size = sizes.patch_size
        self.is_clip = sizes.is_clip
        hidden = sizes.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "patch_embedding.weight": (hidden, 3, self.size, self.size),
            "position_embedding.weight": (sizes.num_positions, hidden),
            "class_embedding" if self.is_clip else "patch_embedding.bias": (hidden,),
        }
        self.parameters_of = Parameters(build, shapes)

    def forward(self, pixels: Tensor) -> Tensor:
        given = self.parameters_of
        weight = given["patch_embedding.weight"].flatten(1)
        unfolded = functional.unfold(pixels.to(weight.dtype), self.size, stride=self.size)
        bias = None if self.is_clip else given["patch_embedding.bias"]
        vectors = functional.linear(unfolded.transpose(1, 2), weight, bias)
        if self.is_clip:
            first = given["class_embedding"].expand(len(vectors), 1, -1)
            vectors = torch.cat([first, vectors], 1)
        return vectors + given["position_embedding.weight"]


@dataclass(frozen=True)
class LayerNames:
    """What a checkpoint calls the modules of a layer. attention, feed_forward: the parents of the
    others. qkv: see `QKVLinear`."""

    norms: tuple[str, str] = ("layer_norm1", "layer_norm2")
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "out_proj"
    feed_forward: str = "mlp"
    linears: tuple[str, str] = ("fc1", "fc2")


TIMM = LayerNames(("norm1", "norm2"), "attn", ("qkv",), "proj")
"""The names of timm, a library of vision models."""


class VisionLayer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). Positions of an item attend to all of
    it. names: None = those of transformers."""

    def __init__(self, build: Build, sizes: VisionSizes, names: LayerNames | None = None) -> None:
        super().__init__()
        names = names or LayerNames()
        size = sizes.hidden_size
        heads = sizes.num_heads
        attention = build.at(names.attention)
        self.attention_norm = LayerNorm(build.at(names.norms[0]), size, sizes.eps)
        self.qkv = QKVLinear(
            attention, size, heads, heads, size // heads, bias=True, names=names.qkv
        )
        self.out = Linear(attention.at(names.out), size, size, bias=True)
        self.last_norm = LayerNorm(build.at(names.norms[1]), size, sizes.eps)
        width = sizes.intermediate_size
        inner = build.at(names.feed_forward)
        self.up = Linear(inner.at(names.linears[0]), size, width, bias=True)
        self.down = Linear(inner.at(names.linears[1]), width, size, bias=True)
        self.activation = activation_of(sizes.activation)

    def forward(self, hidden: Tensor, count: int, seen: Tensor | None = None) -> Tensor:
        """[count · positions, hidden] → the same. count: items. seen: bool [count, 1, 1,
        positions], the positions that others attend to; None = all."""
        hidden = hidden + self.attend(self.attention_norm(hidden), count, seen)
        return hidden + self.down(self.activation(self.up(self.last_norm(hidden))))

    def attend(self, rows: Tensor, count: int, seen: Tensor | None = None) -> Tensor:
        """Return the attention of each item to itself: [count · positions, hidden] → the same."""
        query, key, value = (
            part.unflatten(0, (count, -1)).transpose(1, 2) for part in self.qkv(rows)
        )
        mixed = self.mix(query, key, value, seen).transpose(1, 2)
        attended: Tensor = self.out(mixed.reshape(rows.shape))
        return attended

    def mix(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> Tensor:
        """[count, heads, positions, channels] of each → the same."""
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
