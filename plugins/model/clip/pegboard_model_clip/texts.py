"""What CLIP and SigLIP share: layers that read texts, and rows that have the vector of an image.

An image is a prompt of one token. Its row has the channels of the layers for texts, then the vector
that the tower makes, then a one. The layers for texts also compute this token, and nothing reads
the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.errors import ModelError
from pegboard.layers import Attention, Build, Embedding, LayerNorm, LayerStack, Linear
from pegboard_model_clip.sizes import TextSizes
from pegboard_models.parameters import Parameters
from pegboard_models.vision import activation_of


class TextModel(nn.Module):
    """[T] token ids → the vectors of the prompts up to each token, [T, size]. name: of the
    model. size: the numbers of a vector. Subclasses have `project`."""

    project: Callable[[Tensor], Tensor]

    def __init__(self, name: str, build: Build, sizes: TextSizes, size: int) -> None:
        super().__init__()
        if build.is_divided:
            raise ModelError(
                f"the layers of {name} cannot be divided among pipeline stages; use "
                "tensor_parallel_size"
            )
        self.name = name
        self.size = size
        self.width = sizes.hidden_size
        root = build.at("text_model")
        embeddings = root.at("embeddings")
        self.embedding = Embedding(embeddings.at("token_embedding"), sizes.vocab_size, self.width)
        places = {"position_embedding.weight": (sizes.max_position_embeddings, self.width)}
        self.positions = Parameters(embeddings, places)
        self.layers = LayerStack(
            root.at("encoder").at("layers"),
            sizes.num_hidden_layers,
            lambda place, index: TextLayer(place, index, sizes),
            LayerNorm(root.at("final_layer_norm"), self.width, sizes.layer_norm_eps),
        )

    def rows_of(self, vectors: Tensor) -> Sequence[Tensor]:
        """Return the rows of images: vectors [n, size] → n times [1, width + size + 1]."""
        rows = functional.pad(functional.pad(vectors, (self.width, 0)), (0, 1), value=1.0)
        return rows.split(1)

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] → [T, width + size + 1]"""
        rows: Tensor = functional.pad(self.embedding(input_ids), (0, self.size + 1))
        return rows

    def forward(self, rows: Tensor, positions: Tensor) -> Tensor:
        table = self.positions["position_embedding.weight"]
        states = self.layers(rows[:, : self.width] + table[positions])
        return torch.where(rows[:, -1:] > 0, rows[:, self.width : -1], self.project(states))

    def logits(self, hidden: Tensor) -> Tensor:
        raise ModelError(f"{self.name} makes vectors and no text; use --runner pooling")


class TextLayer(nn.Module):
    """Attention, and a feed-forward block, each after a norm."""

    def __init__(self, build: Build, index: int, sizes: TextSizes) -> None:
        super().__init__()
        width = sizes.hidden_size
        count = sizes.num_attention_heads
        self.head_dim = width // count
        heads = (count, count, self.head_dim)
        attention = build.at("self_attn")
        self.attention_norm = LayerNorm(build.at("layer_norm1"), width, sizes.layer_norm_eps)
        self.projections = nn.ModuleList(
            Linear(attention.at(name), width, width, bias=True, split="rows", heads=heads)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        self.attend = Attention(attention, index, count, count, self.head_dim)
        self.out = Linear(
            attention.at("out_proj"), width, width, bias=True, split="columns", heads=heads
        )
        self.last_norm = LayerNorm(build.at("layer_norm2"), width, sizes.layer_norm_eps)
        inner = sizes.intermediate_size
        self.up = Linear(build.at("mlp").at("fc1"), width, inner, bias=True, split="rows")
        self.down = Linear(build.at("mlp").at("fc2"), inner, width, bias=True, split="columns")
        self.activation = activation_of(sizes.hidden_act)

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden, residual = self.attention_norm.add(hidden, residual)
        split = (each(hidden).view(hidden.shape[0], -1, self.head_dim) for each in self.projections)
        hidden, residual = self.last_norm.add(self.out(self.attend(*split)), residual)
        return self.down(self.activation(self.up(hidden))), residual
