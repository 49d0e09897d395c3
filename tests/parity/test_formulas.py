"""Architectures that transformers lacks, compared with their formulas in plain torch over whole
texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_dense_families import (
    DIM,
    HEADS,
    HIDDEN,
    VOCAB,
    WIDTH,
    Tensors,
    random_tensors,
    reference_of,
    write_checkpoint,
)
from torch import Tensor
from torch.nn import functional

EXPERTS = 4
LAYERS = 4
KV_HEADS = 2
EPS = 1e-5
LLAMA = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 64,
    "rms_norm_eps": EPS,
}
Shapes = dict[str, tuple[int, ...]]
Product = Callable[[str, Tensor], Tensor]


def turned(x: Tensor, base: float) -> Tensor:
    """Rotate channel i of each head [T, heads, DIM] with channel i + DIM / 2."""
    angles = torch.arange(len(x))[:, None, None] * base ** (-torch.arange(DIM // 2) / (DIM // 2))
    first, second = x.chunk(2, -1)
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        -1,
    )


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    base: float,
    scale: float,
    cap: float = 0.0,
    window: int = 10**6,
) -> Tensor:
    """q [T, HEADS, DIM], k, v [T, KV heads, DIM] → [T, HEADS · DIM]. cap: of scores; 0 = none.
    window: keys that a query reads, with its own."""
    q = turned(q, base)
    k = turned(k, base)
    k, v = (part.repeat_interleave(HEADS // part.shape[1], 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
    hidden = (distance < 0) | (distance >= window)
    return torch.einsum(
        "hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v
    ).flatten(1)


def swiglu(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: Any = functional.silu
) -> Tensor:
    return (activation(x @ gate.T) * (x @ up.T)) @ down.T


def mixed(
    x: Tensor,
    router: Tensor,
    experts: list[list[Tensor]],
    top_k: int,
    renormalize: bool,
    activation: Any,
) -> Tensor:
    """Every expert computes every token; the weights of those that are not chosen are 0."""
    shares = (x @ router.T).softmax(-1)
    least = shares.topk(top_k, -1).values[:, -1:]
    weights = shares.masked_fill(shares < least, 0)
    weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    outputs = torch.stack([swiglu(x, *matrices, activation=activation) for matrices in experts], 1)
    return (outputs * weights.unsqueeze(-1)).sum(1)


def attention_shapes(at: str) -> Shapes:
    sizes = {
        "q_proj": (HIDDEN, HIDDEN),
        "k_proj": (KV_HEADS * DIM, HIDDEN),
        "v_proj": (KV_HEADS * DIM, HIDDEN),
        "o_proj": (HIDDEN, HIDDEN),
    }
    return {f"{at}{name}.weight": size for name, size in sizes.items()}


def heads_of(tensors: Tensors, at: str, x: Tensor) -> list[Tensor]:
    return [(x @ tensors[f"{at}{name}_proj.weight"].T).unflatten(1, (-1, DIM)) for name in "qkv"]


def block_shapes(at: str, names: tuple[str, str, str], width: int) -> Shapes:
    sizes = ((width, HIDDEN), (width, HIDDEN), (HIDDEN, width))
    return {f"{at}{name}.weight": size for name, size in zip(names, sizes, strict=True)}


def norm(tensors: Tensors, name: str, x: Tensor, offset: float = 0.0) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], tensors[name] + offset, EPS)


class Grok:
    """github.com/xai-org/grok-1, model.py. The rows of published checkpoints have the names of its
    port to PyTorch."""

    config = {
        **LLAMA,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "attn_output_multiplier": 0.3,
        "max_attn_value": 2.0,
        "embedding_multiplier_scale": 5.0,
        "output_multiplier_scale": 0.5,
        "tie_word_embeddings": True,
    }
    matrices = ("linear", "linear_v", "linear_1")

    def __init__(self) -> None:
        shapes: Shapes = {
            "model.embed_tokens.weight": (VOCAB, HIDDEN),
            "model.norm.scale": (HIDDEN,),
        }
        for i in range(LAYERS):
            at = f"model.layers.{i}."
            shapes |= {
                f"{at}{place}_norm.scale": (HIDDEN,)
                for place in ("pre_attn", "post_attn", "pre_moe", "post_moe")
            }
            shapes |= attention_shapes(f"{at}attn.") | {
                f"{at}moe_block.gate.weight": (EXPERTS, HIDDEN)
            }
            for expert in range(EXPERTS):
                shapes |= block_shapes(f"{at}moe_block.experts.{expert}.", self.matrices, WIDTH)
        self.tensors = random_tensors(shapes)

    def __call__(self, ids: Tensor) -> Any:
        own = self.tensors
        x = own["model.embed_tokens.weight"][ids[0]] * 5.0
        for i in range(LAYERS):
            at = f"model.layers.{i}."
            q, k, v = heads_of(own, f"{at}attn.", norm(own, f"{at}pre_attn_norm.scale", x))
            y = (
                attended(q, k, v, base=10_000.0, scale=0.3, cap=2.0)
                @ own[f"{at}attn.o_proj.weight"].T
            )
            x = x + norm(own, f"{at}post_attn_norm.scale", y)
            experts = [
                [own[f"{at}moe_block.experts.{e}.{name}.weight"] for name in self.matrices]
                for e in range(EXPERTS)
            ]
            gelu = partial(functional.gelu, approximate="tanh")
            y = norm(own, f"{at}pre_moe_norm.scale", x)
            y = mixed(y, own[f"{at}moe_block.gate.weight"], experts, 2, False, gelu)
            x = x + norm(own, f"{at}post_moe_norm.scale", y)
        logits = norm(own, "model.norm.scale", x) @ own["model.embed_tokens.weight"].T * 0.5
        return SimpleNamespace(logits=logits[None])


class Plamo:
    """PLaMo 3: windows on three of four layers, and norms around both blocks."""

    config = {
        **LLAMA,
        "head_dim": DIM,
        "window_size": 9,
        "sliding_window_pattern": 4,
        "rope_theta": 2000,
        "rope_local_theta": 500,
        "tie_word_embeddings": True,
    }
    norms = ("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm")

    def __init__(self) -> None:
        shapes: Shapes = {
            "model.embed_tokens.weight": (VOCAB, HIDDEN),
            "model.norm.weight": (HIDDEN,),
        }
        for i in range(LAYERS):
            at = f"model.layers.layers.{i}."
            shapes |= {f"{at}{name}.weight": (HIDDEN,) for name in self.norms}
            shapes |= {f"{at}mixer.{name}.weight": (DIM,) for name in ("q_norm", "k_norm")}
            shapes |= {
                f"{at}mixer.qkv_proj.weight": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
                f"{at}mixer.o_proj.weight": (HIDDEN, HIDDEN),
                f"{at}mlp.gate_up_proj.weight": (2 * WIDTH, HIDDEN),
                f"{at}mlp.down_proj.weight": (HIDDEN, WIDTH),
            }
        self.tensors = {
            name: tensor - (1.0 if tensor.dim() == 1 else 0.0)
            for name, tensor in random_tensors(shapes).items()
        }

    def __call__(self, ids: Tensor) -> Any:
        own = self.tensors
        x = own["model.embed_tokens.weight"][ids[0]]
        for i in range(LAYERS):
            at = f"model.layers.layers.{i}."
            heads = (
                norm(own, f"{at}pre_mixer_norm.weight", x, 1.0)
                @ own[f"{at}mixer.qkv_proj.weight"].T
            ).unflatten(1, (-1, DIM))
            q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
            q = norm(own, f"{at}mixer.q_norm.weight", q, 1.0)
            k = norm(own, f"{at}mixer.k_norm.weight", k, 1.0)
            base, window = (2000.0, 10**6) if i == 3 else (500.0, 9)
            y = (
                attended(q, k, v, base=base, scale=DIM**-0.5, window=window)
                @ own[f"{at}mixer.o_proj.weight"].T
            )
            x = x + norm(own, f"{at}post_mixer_norm.weight", y, 1 / 5)
            y = norm(own, f"{at}pre_mlp_norm.weight", x, 1.0)
            y = swiglu(
                y, *own[f"{at}mlp.gate_up_proj.weight"].chunk(2), own[f"{at}mlp.down_proj.weight"]
            )
            x = x + norm(own, f"{at}post_mlp_norm.weight", y, 1 / 5**1.5)
        return SimpleNamespace(
            logits=(norm(own, "model.norm.weight", x, 1.0) @ own["model.embed_tokens.weight"].T)[
                None
            ]
        )


class Arctic:
    """Snowflake's dense decoder with experts beside every second layer."""

    config = {
        **LLAMA,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_layer_frequency": 2,
        "rope_theta": 900.0,
        "parallel_attn_mlp_res": True,
        "use_residual": True,
        "hidden_act": "silu",
    }
    matrices = ("w1", "w3", "w2")

    def __init__(self) -> None:
        shapes: Shapes = dict.fromkeys(
            ("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, HIDDEN)
        )
        shapes["model.norm.weight"] = (HIDDEN,)
        for i in range(LAYERS):
            at = f"model.layers.{i}."
            has_experts = i % 2 == 1
            names = ("input_layernorm", "post_attention_layernorm", "residual_layernorm")[
                : 3 if has_experts else 2
            ]
            shapes |= attention_shapes(f"{at}self_attn.") | {
                f"{at}{name}.weight": (HIDDEN,) for name in names
            }
            if not has_experts:
                shapes |= block_shapes(f"{at}block_sparse_moe.mlp.", self.matrices, WIDTH)
                continue
            shapes |= block_shapes(f"{at}residual_mlp.", self.matrices, HIDDEN)
            shapes[f"{at}block_sparse_moe.gate.weight"] = (EXPERTS, HIDDEN)
            for expert in range(EXPERTS):
                shapes |= block_shapes(
                    f"{at}block_sparse_moe.experts.{expert}.", self.matrices, WIDTH
                )
        self.tensors = random_tensors(shapes)

    def __call__(self, ids: Tensor) -> Any:
        own = self.tensors
        x = own["model.embed_tokens.weight"][ids[0]]
        for i in range(LAYERS):
            at = f"model.layers.{i}."
            q, k, v = heads_of(own, f"{at}self_attn.", norm(own, f"{at}input_layernorm.weight", x))
            y = (
                x
                + attended(q, k, v, base=900.0, scale=DIM**-0.5)
                @ own[f"{at}self_attn.o_proj.weight"].T
            )
            if i % 2 == 0:
                matrices = [
                    own[f"{at}block_sparse_moe.mlp.{name}.weight"] for name in self.matrices
                ]
                x = y + swiglu(norm(own, f"{at}post_attention_layernorm.weight", y), *matrices)
                continue
            matrices = [own[f"{at}residual_mlp.{name}.weight"] for name in self.matrices]
            dense = swiglu(norm(own, f"{at}residual_layernorm.weight", y), *matrices)
            at = f"{at}block_sparse_moe."
            experts = [
                [own[f"{at}experts.{e}.{name}.weight"] for name in self.matrices]
                for e in range(EXPERTS)
            ]
            read = norm(own, f"model.layers.{i}.post_attention_layernorm.weight", x)
            x = y + dense + mixed(read, own[f"{at}gate.weight"], experts, 2, True, functional.silu)
        return SimpleNamespace(
            logits=(norm(own, "model.norm.weight", x) @ own["lm_head.weight"].T)[None]
        )


class Step3:
    """Attention with a factorized query and one head of keys and values; a shared expert (arXiv
    2507.19427)."""

    rank = 24
    config = {
        **LLAMA,
        "num_attention_groups": 1,
        "head_dim": DIM,
        "share_q_dim": rank,
        "moe_num_experts": EXPERTS,
        "moe_top_k": 2,
        "moe_intermediate_size": WIDTH,
        "share_expert_dim": 40,
        "norm_expert_weight": False,
        "moe_layers_enum": "1,3",
        "max_position_embedding": 64,
        "rope_theta": 700.0,
    }
    config = {
        name: value
        for name, value in config.items()
        if name not in ("num_key_value_heads", "max_position_embeddings")
    }
    matrices = ("gate_proj", "up_proj", "down_proj")

    def __init__(self) -> None:
        shapes: Shapes = dict.fromkeys(
            ("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, HIDDEN)
        )
        shapes["model.norm.weight"] = (HIDDEN,)
        for i in range(LAYERS):
            at = f"model.layers.{i}."
            shapes |= {
                f"{at}{name}.weight": (HIDDEN,)
                for name in ("input_layernorm", "post_attention_layernorm")
            }
            own = {
                "q_proj": (self.rank, HIDDEN),
                "k_proj": (DIM, HIDDEN),
                "v_proj": (DIM, HIDDEN),
                "inter_norm": (self.rank,),
                "wq": (HEADS * DIM, self.rank),
                "o_proj": (HIDDEN, HEADS * DIM),
            }
            shapes |= {f"{at}self_attn.{name}.weight": size for name, size in own.items()}
            if i % 2 == 0:
                shapes |= block_shapes(f"{at}mlp.", self.matrices, WIDTH)
                continue
            stacked = block_shapes(f"{at}moe.", self.matrices, WIDTH)
            shapes |= {name: (EXPERTS, *size) for name, size in stacked.items()}
            shapes |= block_shapes(f"{at}share_expert.", self.matrices, 40) | {
                f"{at}moe.gate.weight": (EXPERTS, HIDDEN)
            }
        self.tensors = random_tensors(shapes)

    def __call__(self, ids: Tensor) -> Any:
        own = self.tensors
        x = own["model.embed_tokens.weight"][ids[0]]
        for i in range(LAYERS):
            at = f"model.layers.{i}."
            q, k, v = (
                norm(own, f"{at}input_layernorm.weight", x)
                @ own[f"{at}self_attn.{name}_proj.weight"].T
                for name in "qkv"
            )
            q = norm(own, f"{at}self_attn.inter_norm.weight", q) @ own[f"{at}self_attn.wq.weight"].T
            heads = [part.unflatten(1, (-1, DIM)) for part in (q, k, v)]
            x = (
                x
                + attended(*heads, base=700.0, scale=DIM**-0.5)
                @ own[f"{at}self_attn.o_proj.weight"].T
            )
            y = norm(own, f"{at}post_attention_layernorm.weight", x)
            if i % 2 == 0:
                x = x + swiglu(y, *(own[f"{at}mlp.{name}.weight"] for name in self.matrices))
                continue
            shared = swiglu(y, *(own[f"{at}share_expert.{name}.weight"] for name in self.matrices))
            experts = [
                [own[f"{at}moe.{name}.weight"][e] for name in self.matrices] for e in range(EXPERTS)
            ]
            x = (
                x
                + shared
                + mixed(y, own[f"{at}moe.gate.weight"], experts, 2, False, functional.silu)
            )
        return SimpleNamespace(
            logits=(norm(own, "model.norm.weight", x) @ own["lm_head.weight"].T)[None]
        )


class Plamo2:
    """Mamba-2 with normalized steps, inputs and outputs; attention in every second layer."""

    state = 6
    rank = 64
    num_heads = 3
    config = {
        **LLAMA,
        "hidden_size_per_head": DIM,
        "mamba_step": 2,
        "mamba_num_heads": num_heads,
        "mamba_d_state": state,
        "mamba_d_conv": 4,
        "tie_word_embeddings": True,
    }

    def __init__(self) -> None:
        shapes: Shapes = {
            "model.embed_tokens.weight": (VOCAB, HIDDEN),
            "model.norm.weight": (HIDDEN,),
        }
        inner = self.num_heads * DIM
        read = (("B_norm", self.state), ("C_norm", self.state), ("dt_norm", self.rank))
        heads: Shapes = {}
        for i in range(LAYERS):
            at = f"model.layers.layers.{i}."
            shapes |= {f"{at}{name}.weight": (HIDDEN,) for name in Plamo.norms}
            shapes |= {
                f"{at}mlp.gate_up_proj.weight": (2 * WIDTH, HIDDEN),
                f"{at}mlp.down_proj.weight": (HIDDEN, WIDTH),
            }
            at += "mixer."
            if i % 2:
                shapes |= {
                    f"{at}qkv_proj.weight": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
                    f"{at}o_proj.weight": (HIDDEN, HEADS * DIM),
                }
                heads |= {f"{at}q_weight": (HEADS * DIM,), f"{at}k_weight": (KV_HEADS * DIM,)}
                continue
            shapes |= {
                f"{at}in_proj.weight": (2 * inner, HIDDEN),
                f"{at}conv1d.weight": (inner, 1, 4),
                f"{at}bcdt_proj.weight": (2 * self.state + self.rank, inner),
                f"{at}dt_proj.weight": (self.num_heads, self.rank),
                f"{at}out_proj.weight": (HIDDEN, inner),
            }
            heads |= {f"{at}{name}_weight": (size,) for name, size in read}
            heads |= {f"{at}{name}": (self.num_heads,) for name in ("A_log", "D", "dt_bias")}
        self.tensors = {
            name: tensor - (1.0 if tensor.dim() == 1 else 0.0)
            for name, tensor in random_tensors(shapes).items()
        }
        own = random_tensors(heads)
        self.tensors |= {
            name: t.view(-1, DIM) if name.endswith(("q_weight", "k_weight")) else t
            for name, t in own.items()
        }

    def mamba(self, at: str, x: Tensor) -> Tensor:
        """Token by token, as the recurrence is written."""
        own = self.tensors
        gate, x = (
            (x @ own[f"{at}in_proj.weight"].T).unflatten(1, (self.num_heads, 2 * DIM)).split(DIM, 2)
        )
        padded = functional.pad(x.flatten(1).T, (3, 0))
        x = functional.silu(
            functional.conv1d(padded[None], own[f"{at}conv1d.weight"], groups=len(padded))[0].T
        )
        parts = (x @ own[f"{at}bcdt_proj.weight"].T).split([self.state, self.state, self.rank], 1)
        b, c, steps = (
            norm(own, f"{at}{n}_norm_weight", part)
            for n, part in zip(("B", "C", "dt"), parts, strict=True)
        )
        steps = functional.softplus(steps @ own[f"{at}dt_proj.weight"].T + own[f"{at}dt_bias"])
        x = x.unflatten(1, (self.num_heads, DIM))
        h = torch.zeros(self.num_heads, DIM, self.state)
        outputs = []
        for t in range(len(x)):
            decay = torch.exp(-steps[t] * own[f"{at}A_log"].exp())[:, None, None]
            h = h * decay + (steps[t][:, None] * x[t])[:, :, None] * b[t]
            outputs.append((h * c[t]).sum(-1) + own[f"{at}D"][:, None] * x[t])
        return (torch.stack(outputs) * functional.silu(gate)).flatten(1) @ own[
            f"{at}out_proj.weight"
        ].T

    def attention(self, at: str, x: Tensor) -> Tensor:
        own = self.tensors
        heads = (x @ own[f"{at}qkv_proj.weight"].T).unflatten(1, (-1, DIM))
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        q, k = (
            functional.rms_norm(part, (DIM,), eps=EPS) * own[f"{at}{n}_weight"]
            for n, part in (("q", q), ("k", k))
        )
        return attended(q, k, v, base=10_000.0, scale=DIM**-0.5) @ own[f"{at}o_proj.weight"].T

    def __call__(self, ids: Tensor) -> Any:
        own = self.tensors
        x = own["model.embed_tokens.weight"][ids[0]]
        for i in range(LAYERS):
            at = f"model.layers.layers.{i}."
            mixer = self.attention if i % 2 else self.mamba
            y = mixer(f"{at}mixer.", norm(own, f"{at}pre_mixer_norm.weight", x, 1.0))
            x = x + norm(own, f"{at}post_mixer_norm.weight", y, 1 / 5)
            y = norm(own, f"{at}pre_mlp_norm.weight", x, 1.0)
            y = swiglu(
                y, *own[f"{at}mlp.gate_up_proj.weight"].chunk(2), own[f"{at}mlp.down_proj.weight"]
            )
            x = x + norm(own, f"{at}post_mlp_norm.weight", y, 1 / 5**1.5)
        return SimpleNamespace(
            logits=(norm(own, "model.norm.weight", x, 1.0) @ own["model.embed_tokens.weight"].T)[
                None
            ]
        )


def test_plamo_2(check_parity: Any, check_cached: Any, check_recorded: Any, tmp_path: Path) -> None:
    reference = write_model("Plamo2ForCausalLM", Plamo2(), tmp_path / "model")
    check_parity(reference, mamba_block_size=8)
    check_parity(
        reference,
        lengths=(3, 20, 40, 33),
        num_gpu_blocks_override=17,
        max_model_len=56,
        mamba_block_size=8,
    )
    check_cached(reference, (56, 52, 48), mamba_block_size=8)
    check_recorded(reference)


MODELS: dict[str, Any] = {
    "Grok1ModelForCausalLM": Grok,
    "Plamo3ForCausalLM": Plamo,
    "ArcticForCausalLM": Arctic,
    "Step3TextForCausalLM": Step3,
}


def write_model(name: str, model: Any, directory: Path) -> Any:
    """Write a checkpoint of this architecture. Return its reference."""
    return reference_of(write_checkpoint(directory, name, model.config, model.tensors), model)


@pytest.mark.parametrize("name", MODELS)
def test_formulas(
    check_parity: Any, check_cached: Any, check_recorded: Any, tmp_path: Path, name: str
) -> None:
    """Prompts in chunks and in one batch, preempted, from the prefix cache, and recorded."""
    model = MODELS[name]()
    reference = write_model(name, model, tmp_path / "model")
    check_parity(reference)
    check_parity(
        reference,
        lengths=(3, 20, 40, 33),
        num_gpu_blocks_override=50 if model.__class__ is Plamo else 19,
        max_model_len=56,
    )
    check_cached(reference, (37, 30, 13))
    check_recorded(reference)
