"""The MLP speculator (Wertheimer et al. 2024, "Accelerating production LLMs with combined
token/embedding speculators"). A state begins as the target's hidden states. Each stage mixes it
with the embedding of the last token, and has an output head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, Embedding, Head, LayerNorm, Linear, read, size_of

EPS = 1e-6


class ShiftedNorm(LayerNorm):
    """[N, size] → x / sqrt(mean(x²) + eps) * weight + bias. The mean is not subtracted."""

    def bind(self) -> None:
        assert self.bias is not None, "this norm has one"
        weight = self.weight.data
        bias = self.bias.data
        eps = self.eps
        rms_norm = self.build.kernels["rms_norm"]
        self.forward = lambda x: rms_norm(x, weight, eps) + bias


class MLPSpeculator(nn.Module):
    """Implements `pegboard.interfaces.model.Model`. Its proposer calls `begin`, and then `next` and
    `logits_of` for each stage."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        vocab_size = size_of(config, "vocab_size")
        width = size_of(config, "emb_dim")
        inner = size_of(config, "inner_dim")
        count = size_of(config, "n_predict")
        is_tied = bool(read(config, "tie_weights", bool))
        self.most_drafts = count
        self.is_scaled = bool(read(config, "scale_input", bool))
        root = build.at("speculator") if build.has("speculator") else build
        stages = range(count)
        # tied stages have the modules of the first one; only its projection reads another size
        first = 1 if is_tied else count
        num_heads = 1 if is_tied and not build.has(root.at("head.1").path) else count
        embeddings = [Embedding(root.at(f"emb.{i}"), vocab_size, inner) for i in stages[:first]]
        norms = [ShiftedNorm(root.at(f"ln.{i}"), inner, EPS) for i in stages[:first]]
        heads = [Head(root.at(f"head.{i}"), vocab_size, inner) for i in stages[:num_heads]]
        projections = [
            Linear(root.at(f"proj.{i}"), inner if i else width, inner) for i in stages[: first + 1]
        ]
        self.embeddings, self.norms, self.heads, self.projections = (
            nn.ModuleList(modules[min(i, len(modules) - 1)] for i in stages)
            for modules in (embeddings, norms, heads, projections)
        )
        state_weight = 0.5 ** (0.5 / count)
        embedding_weight = ((1 - state_weight**2) * (inner / 2)) ** 0.5
        self.mix = embedding_weight / state_weight

    def begin(self, hidden: Tensor) -> Tensor:
        """Return the first state [N, emb_dim], from the target's hidden states [N, emb_dim]."""
        if not self.is_scaled:
            return hidden
        wide = hidden.float()
        scale = (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() / 2**0.5
        return (wide * scale).to(hidden.dtype)

    def next(self, stage: int, state: Tensor, token_ids: Tensor) -> Tensor:
        """Return the state [N, inner_dim] of a stage, from the state before it and the last token
        [N]."""
        embedded = self.embeddings[stage](token_ids)
        mixed = self.projections[stage](state) + embedded * self.mix
        return functional.gelu(self.norms[stage](mixed))

    def logits_of(self, stage: int, state: Tensor) -> Tensor:
        """Return the logits [N, V] float32 of a stage's state [N, inner_dim]."""
        out: Tensor = self.heads[stage](state)
        return out

    def embed(self, input_ids: Tensor) -> Tensor:
        """Hand the tokens through."""
        return input_ids

    def forward(self, hidden: Tensor, *positions: Tensor) -> Tensor:
        """Hand the target's hidden states through."""
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, V] float32 of the last stage's state [N, inner_dim]."""
        return self.logits_of(-1, hidden)
