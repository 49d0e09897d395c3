"""Step-3 (StepFun 2025, arXiv 2507.19427): attention with one head of keys and values, whose
queries come from a normalized vector of a few channels; experts with a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import Attention, Build, Linear, RouterRule, read, size_of
from pegboard_model_dense.architecture import Architecture, ExpertSizes
from pegboard_model_dense.attention import Step
from pegboard_model_dense.config import common, renamed, with_experts
from pegboard_model_dense.decoder import Decoder


class Step3(Decoder):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        self.query_rank = read(config, "share_q_dim", int) or read(config, "head_dim", int) or 256
        super().__init__(config, build)

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        base = {
            "rms_norm_eps": 1e-5,
            "head_dim": 256,
            **renamed(config, max_position_embeddings="max_position_embedding"),
            "num_key_value_heads": 1,
            "hidden_act": "silu",
        }
        experts = ExpertSizes(
            count=size_of(config, "moe_num_experts"),
            width=size_of(config, "moe_intermediate_size"),
            rule=RouterRule(
                size_of(config, "moe_top_k"),
                renormalize=bool(read(config, "norm_expert_weight", bool)),
            ),
            router="moe.gate",
            modules="moe",
            shared="share_expert",
            shared_width=size_of(config, "share_expert_dim"),
        )
        model = common(base)
        chosen = _layers_with_experts(config, len(model.layers))
        return with_experts(model, experts, lambda index: index in chosen)

    def make_attention(self, build: Build, index: int, model: Architecture) -> nn.Module:
        return FactorizedAttention(build, index, model, self.query_rank, self.ropes[0])


def _layers_with_experts(config: Mapping[str, Any], count: int) -> set[int]:
    """Return the layers that `moe_layers_enum` lists, as text with commas or as a list; all but the
    first if it is missing."""
    value = config.get("moe_layers_enum")
    if value is None:
        return set(range(1, count))
    try:
        return {int(index) for index in (value.split(",") if isinstance(value, str) else value)}
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"the checkpoint's config has moe_layers_enum={value!r}; expected numbers of layers"
        ) from error


class FactorizedAttention(nn.Module):
    """Multi-matrix factorization attention: q = wq(norm(q_proj(x))), one key and one value for all
    heads."""

    def __init__(self, build: Build, index: int, model: Architecture, rank: int, rope: Any) -> None:
        super().__init__()
        hidden = model.hidden_size
        dim = model.head_dim
        heads = model.num_heads
        self.dim = dim
        self.q_proj = Linear(build.at("q_proj"), hidden, rank)
        self.k_proj = Linear(build.at("k_proj"), hidden, dim)
        self.v_proj = Linear(build.at("v_proj"), hidden, dim)
        self.norm = model.norm(build.at("inter_norm"), rank, model.eps)
        sizes = (heads, 1, dim)
        self.wq = Linear(build.at("wq"), rank, heads * dim, split="rows", heads=sizes)
        self.out = Linear(build.at("o_proj"), heads * dim, hidden, split="columns", heads=sizes)
        self.attention = Attention(build, index, *sizes, rope=rope)

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        k, v = (
            project(hidden).view(len(hidden), 1, self.dim) for project in (self.k_proj, self.v_proj)
        )
        q = self.wq(self.norm(self.q_proj(hidden))).view(len(hidden), -1, self.dim)
        out: Tensor = self.out(self.attention(q, k, v, step[0]))
        return out
