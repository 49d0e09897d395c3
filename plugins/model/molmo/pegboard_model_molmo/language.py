"""The language model: Qwen 2 (Molmo-D, 72B) or OLMo (Molmo-O), under the names of OLMo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, Part
from pegboard.interfaces.weight_loader import WantedWeight
from pegboard.layers import Build, Embedding, Head, LayerStack, Linear, Norm, read, size_of
from pegboard_model_molmo.sizes import FORM, NEW_TOKENS, refuse_others
from pegboard_models.blocks import PostNorm, PreNorm, SelfAttention, heads_of
from pegboard_models.norms import all_heads
from pegboard_models.parameters import Parameters
from pegboard_models.rope import rope_parameters, scaled_rope


class Language(nn.Module):
    """[T] token ids → [T, vocabulary] logits. The last tokens of the vocabulary are only read:
    their logits are -inf."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        refuse_others("config", config, FORM)
        build.declared.has_language = True
        build = replace(build, is_language=True)
        root = build.at("model.transformer")
        hidden = size_of(config, "hidden_size")
        heads = heads_of(config)
        eps = read(config, "layer_norm_eps", float) or 1e-5
        base, scaling = rope_parameters(config)
        self.rope = scaled_rope(
            build,
            heads[2],
            max_positions=read(config, "max_position_embeddings", int) or 2048,
            base=base,
            scaling=scaling,
        )
        options: dict[str, Any] = {
            "bias": bool(read(config, "qkv_bias", bool)),
            "norm": partial(all_heads, eps=eps) if is_on(config, "attention_layer_norm") else None,
            "limit": read(config, "clip_qkv", float),
            "rope": self.rope,
            "qkv": ("att_proj",),
            "output": "attn_out",
            "output_bias": False,
        }
        width = width_of(config)

        def layer(build: Build, index: int) -> nn.Module:
            attention = SelfAttention(build, index, hidden, heads, **options)
            norms = [Norm(build.at(name), hidden, eps) for name in ("attn_norm", "ff_norm")]
            feed_forward = FeedForward(build, hidden, width)
            if is_on(config, "norm_after"):
                return PostNorm((attention, norms[0]), (feed_forward, norms[1]))
            return PreNorm((norms[0], attention), (norms[1], feed_forward))

        self.num_rows = read(config, "embedding_size", int) or size_of(config, "vocab_size")
        self.embedding = FirstTable(root.at("wte"), self.num_rows, hidden)
        self.more = None
        if build.stage.is_first:
            self.more = Parameters(root.at("wte").alone(), {"new_embedding": (NEW_TOKENS, hidden)})
        count = size_of(config, "num_hidden_layers")
        norm = Norm(root.at("ln_f"), hidden, eps)
        self.layers = LayerStack(root.at("blocks"), count, layer, norm)
        self.head = Head(root.at("ff_out"), self.num_rows, hidden)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the rows of the two tables. The second one has the last tokens."""
        if self.more is None:
            raise ModelError("this stage of the model has no table of embeddings")
        last = self.num_rows - 1
        rows: Tensor = self.embedding(input_ids.clamp(max=last))
        others = self.more["new_embedding"][(input_ids - last - 1).clamp(min=0)]
        return torch.where((input_ids > last)[:, None], others, rows)

    def forward(self, hidden: Tensor, *positions: Tensor) -> Tensor:
        return self.layers(hidden, self.rope(*positions))

    def logits(self, hidden: Tensor) -> Tensor:
        written: Tensor = self.head(hidden)
        return functional.pad(written, (0, NEW_TOKENS), value=-torch.inf)


class FirstTable(Embedding):
    """An Embedding whose tensor is called "embedding", and not "weight"."""

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        if not self.build.stage.is_first:
            return super().declare(available)
        part = Part(f"{self.build.path}.embedding", (0, self.num_rows))
        layer = EmbeddingLayer(self.build.path, self.num_rows, self.width, part)
        self.method = self.build.method("embedding", layer)
        return self.method.declare(available)


class FeedForward(nn.Module):
    """ff_out(up · silu(gate)). The rows of up come before those of gate in ff_proj."""

    def __init__(self, build: Build, hidden: int, width: int) -> None:
        super().__init__()
        parts = {"ff_proj": (width, width)}
        self.up_gate = Linear(build, hidden, 2 * width, parts=parts, split="rows")
        self.down = Linear(build.at("ff_out"), width, hidden, split="columns")

    def forward(self, hidden: Tensor, *step: Any) -> Tensor:
        up, gate = self.up_gate(hidden).chunk(2, -1)
        out: Tensor = self.down(up * functional.silu(gate))
        return out


def is_on(config: Mapping[str, Any], name: str) -> bool:
    """Return whether a value of the config is true."""
    return bool(read(config, name, bool))


def width_of(config: Mapping[str, Any]) -> int:
    """Return the channels between the matrices of a feed-forward block. The config says how many up
    and gate have together. Raises ModelError."""
    both = size_of(config, "intermediate_size")
    if both < 2 or both % 2:
        raise ModelError(
            f"the checkpoint's config has intermediate_size={both}; expected an even number"
        )
    return both // 2
