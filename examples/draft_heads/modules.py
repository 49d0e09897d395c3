"""The heads that train_draft_heads.py trains, in plain torch, and how their weights are named in a
checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass
class Target:
    """What a head takes from its model, a Llama of transformers. kept: [rows], the ids of the
    tokens that the head may propose."""

    model: Any
    kept: Tensor

    def __post_init__(self) -> None:
        self.config = self.model.config
        self.last_layer = self.model.model.layers[-1]
        self.norm = self.model.model.norm.weight.data.float()
        self.embedding = self.model.get_input_embeddings().weight.data
        self.rows = self.model.get_output_embeddings().weight.data[self.kept].float()

    def logits(self, states: Tensor) -> Tensor:
        """The logits of the kept tokens [..., rows], from states after the final norm."""
        return functional.linear(states, self.rows)


def rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(values.float(), weight.shape, weight, eps)


class EagleHead(nn.Module):
    """One Llama layer that reads the target's states and the next token (Li et al. 2024, "EAGLE";
    with is_third: Li et al. 2025, "EAGLE-3").

    It starts from the target's last layer, and what is joined starts as the last states alone.
    """

    def __init__(self, target: Target, num_taps: int, is_third: bool) -> None:
        super().__init__()
        self.target = target
        self.is_third = is_third
        config = target.config
        size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.eps = config.rms_norm_eps
        width = 2 * size if is_third else size
        joined = torch.zeros(size, (num_taps if is_third else 2) * size)
        joined[:, -size:] = torch.eye(size)
        layer = target.last_layer
        weights = {"fc.weight": joined}
        for name in ("q", "k", "v"):
            weight = getattr(layer.self_attn, f"{name}_proj").weight.data.float()
            beside = torch.randn(len(weight), width - size) * 0.02
            weights[f"self_attn.{name}_proj.weight"] = torch.cat([beside, weight], 1)
        weights["self_attn.o_proj.weight"] = layer.self_attn.o_proj.weight.data.float()
        for name in ("gate", "up", "down"):
            weight = getattr(layer.mlp, f"{name}_proj").weight.data.float()
            weights[f"mlp.{name}_proj.weight"] = weight
        weights["post_attention_layernorm.weight"] = layer.post_attention_layernorm.weight.data
        if is_third:
            weights["input_layernorm.weight"] = torch.ones(size)
            weights["hidden_norm.weight"] = layer.input_layernorm.weight.data
            weights["norm.weight"] = target.norm
        self.weights = nn.ParameterDict(
            {name.replace(".", "/"): weight.clone().float() for name, weight in weights.items()}
        )

    def weight(self, name: str) -> Tensor:
        return self.weights[f"{name}.weight".replace(".", "/")]

    def project(self, values: Tensor, name: str) -> Tensor:
        return functional.linear(values, self.weight(name))

    def heads(self, values: Tensor, name: str, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """[B, L, width] → [B, heads, L, head size], rotated by rope."""
        head_size = self.weight("self_attn.q_proj").shape[0] // self.num_heads
        parts = self.project(values, f"self_attn.{name}_proj")
        parts = parts.unflatten(-1, (-1, head_size)).transpose(1, 2).float()
        if rope is not None:
            first, second = parts.chunk(2, -1)
            parts = parts * rope[0] + torch.cat([-second, first], -1) * rope[1]
        return parts.repeat_interleave(self.num_heads // parts.shape[1], 1)

    def attend(
        self, values: Tensor, stored: list[tuple[Tensor, Tensor]], rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Attention of one depth of the drafts. A draft sees the states of the target up to where
        its chain begins, and the drafts of its own chain. stored: the keys and values of each depth
        so far; those of this depth are added."""
        query = self.heads(values, "q", rope)
        stored.append((self.heads(values, "k", rope), self.heads(values, "v", None)))
        length = query.shape[2]
        mask = torch.full((length, length), -torch.inf).triu(1)
        scale = query.shape[-1] ** -0.5
        scores = [query @ stored[0][0].transpose(-1, -2) * scale + mask]
        scores += [(query * key).sum(-1, keepdim=True) * scale for key, _ in stored[1:]]
        shares = torch.cat(scores, -1).softmax(-1)
        mixed = shares[..., :length] @ stored[0][1]
        for depth, (_, value) in enumerate(stored[1:]):
            mixed = mixed + shares[..., length + depth, None] * value
        return self.project(mixed.transpose(1, 2).flatten(2), "self_attn.o_proj")

    def start(self, taps: Tensor, final: Tensor) -> Tensor:
        """Return what is given with the next token [B, L, size], from the target's states at three
        depths [B, L, taps, size], and those after the final norm [B, L, size]."""
        return self.project(taps.flatten(2), "fc") if self.is_third else final

    def forward(
        self,
        given: Tensor,
        tokens: Tensor,
        stored: list[tuple[Tensor, Tensor]],
        rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        """One depth of drafts. Returns states [B, L, size], which are given to the next depth."""
        embedded = functional.embedding(tokens, self.target.embedding).float()
        if self.is_third:
            total = given
            beside = rms_norm(embedded, self.weight("input_layernorm"), self.eps)
            normed = rms_norm(given, self.weight("hidden_norm"), self.eps)
            values = torch.cat([beside, normed], -1)
        else:
            values = total = self.project(torch.cat([embedded, given], -1), "fc")
        total = total + self.attend(values, stored, rope)
        normed = rms_norm(total, self.weight("post_attention_layernorm"), self.eps)
        gated = functional.silu(self.project(normed, "mlp.gate_proj"))
        return total + self.project(gated * self.project(normed, "mlp.up_proj"), "mlp.down_proj")

    def logits(self, states: Tensor) -> Tensor:
        if self.is_third:
            states = rms_norm(states, self.weight("norm"), self.eps)
        return self.target.logits(states)

    def checkpoint(self) -> dict[str, Tensor]:
        """The tensors under the names of EAGLE's checkpoints."""
        outside = ("fc.weight", "norm.weight")
        layer = "midlayer" if self.is_third else "layers.0"
        names = {name: name.replace("/", ".") for name in self.weights}
        tensors = {
            name if name in outside else f"{layer}.{name}": self.weights[key].data
            for key, name in names.items()
        }
        if self.is_third:
            kept = self.target.kept
            tensors["lm_head.weight"] = self.target.rows
            tensors["d2t"] = kept - torch.arange(len(kept))
        return tensors


class MedusaHeads(nn.Module):
    """A residual block for each place (Cai et al. 2024, "Medusa"), which starts as the model's own
    head."""

    def __init__(self, target: Target, num_heads: int) -> None:
        super().__init__()
        self.target = target
        size = target.config.hidden_size
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(num_heads))
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)

    def logits(self, states: Tensor, depth: int) -> Tensor:
        return self.target.logits(states + functional.silu(self.blocks[depth](states)))

    def checkpoint(self) -> dict[str, Tensor]:
        """The tensors under vLLM's names. All heads share one output head."""
        tensors = {"lm_head.weight": self.target.rows, "token_map": self.target.kept}
        for depth, block in enumerate(self.blocks):
            tensors[f"blocks.{depth}.layers.0.weight"] = block.weight.data
            tensors[f"blocks.{depth}.layers.0.bias"] = block.bias.data
        return tensors
