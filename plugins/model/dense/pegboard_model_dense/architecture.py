"""What distinguishes the models of this package. A family's module reads it from the checkpoint's
config, and passes the classes of which the model is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pegboard.layers import RouterRule

Maker = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Where tensors are in a checkpoint. Those of a layer are relative to the layer, those of its
    attention (qkv, out, q_norm, k_norm, gate) and its feed-forward block (up, down) to these. mlp:
    "" = the tensors of that block are in the layer itself. up: gate and up, one merged module, or
    the only one if there is no gate. after_attention, after_mlp: norms of the results of the two
    blocks, "" = they are not normalized. gate: attention's results are multiplied by the sigmoid of
    this projection, "" = they are not. embedding_norm: a norm after the embedding, positions: a
    vector for each position, added to it; "" = none.
    """

    embedding: str = "model.embed_tokens"
    positions: str = ""
    embedding_norm: str = ""
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    gate: str = ""
    mlp: str = "mlp"
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class Rotary:
    """A rotary embedding. dim: channels of a head that it rotates, the first ones. pairs: channel
    2i is rotated with 2i + 1."""

    base: float
    scaling: Mapping[str, Any]
    dim: int
    pairs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """The experts of a layer. Paths are relative to the layer. count, width: their number and
    intermediate size. router: path of the matrix that scores them. modules: path of the experts,
    which have a module each (`names`: gate, up and down), or are stacked, gate and up as `merged`.
    correction: see `Experts`; "" = none. shared: path of a feed-forward block of shared_width that
    computes every token; shared_width 0 = there is none."""

    count: int
    width: int
    rule: RouterRule
    router: str = "mlp.gate"
    modules: str = "mlp.experts"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    merged: str = "gate_up_proj"
    correction: str = ""
    shared: str = "mlp.shared_experts"
    shared_width: int = 0


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """One layer. window: in tokens. rope: the number of its rotary embedding; None = it has none.
    num_kv_heads: 0 = it has no attention. width: of the feed-forward block; 0 = it has none. scale:
    factor of q·k; None = head_dim^-0.5. experts: instead of the
    feed-forward block. mlp: of this layer; None = that of the architecture."""

    num_kv_heads: int
    width: int
    window: int | None = None
    rope: int | None = 0
    scale: float | None = None
    experts: ExpertSizes | None = None
    mlp: Maker | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model. The first ones are classes, or functions, that build its parts:

    norm         (build, size, eps) → a norm
    after_norms  the same, for the results of attention and of the feed-forward block
    block        (build, architecture, attention, feed_forward) → a layer (see `blocks`)
    attention    (build, index, architecture, own: LayerSizes, ropes) → a part
    qkv          (build, architecture, number of KV heads) → the projections (see `rows`)
    head_norm    (build, heads, head_dim, norm, eps) → a norm of queries or keys; None = none
    mlp          (build, architecture, width) → a part
    head         (build, vocab_size, hidden_size, tied=, bias=) → the output head

    qkv_limit: queries, keys and values are limited to ± this before they are rotated. transposed:
    matrices are stored [in, out]. embedding_scale, residual_scale (of each block's result),
    logits_scale: factors. logits_cap: soft cap; soft_cap: of scores. alibi: slope of each head
    (Press et al. 2022); () = none. first_position: the row of the first position's vector (see
    `Names.positions`). passes: the stack of layers is computed this often, and normalized each
    time. Each pass has a KV cache of its own (Ouro). skips: (from, to, share): the input of layer
    `to` is share · (the input of layer `from`) + (1 - share) · its own.
    """

    norm: Maker
    after_norms: tuple[Maker, Maker]
    block: Maker
    attention: Maker
    qkv: Maker
    head_norm: Maker | None
    mlp: Maker
    head: Maker
    hidden_size: int
    num_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    layers: tuple[LayerSizes, ...]
    ropes: tuple[Rotary, ...] = ()
    eps: float = 1e-6
    names: Names = field(default_factory=Names)
    activation: str = "silu"
    transposed: bool = False
    qkv_bias: bool = False
    qkv_limit: float | None = None
    out_bias: bool = False
    up_bias: bool = False
    down_bias: bool = False
    head_bias: bool = False
    is_tied: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    soft_cap: float | None = None
    logits_cap: float | None = None
    alibi: tuple[float, ...] = ()
    first_position: int = 0
    passes: int = 1
    skips: tuple[tuple[int, int, float], ...] = ()
