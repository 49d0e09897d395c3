"""What distinguishes the models of this package, as data. A family's module reads it from the
checkpoint's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pegboard.errors import ModelError
from pegboard.layers import RouterRule, read, size_of
from pegboard_models.rope import rope_parameters


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
class RopeTraits:
    """A rotary embedding. dim: channels of a head that it rotates, the first ones. pairs: channel
    2i is rotated with 2i + 1."""

    base: float
    scaling: Mapping[str, Any]
    dim: int
    pairs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTraits:
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
class LayerTraits:
    """One layer. window: in tokens. rope: the number of its rotary embedding; None = it has none.
    num_kv_heads: 0 = it has no attention. width: of the feed-forward block; 0 = it has none. scale:
    factor of q·k; None = head_dim^-0.5. experts: in place of the feed-forward block. xielu:
    alpha_p, alpha_n and β of this activation; None = the checkpoint has them as tensors."""

    num_kv_heads: int
    width: int
    window: int | None = None
    rope: int | None = 0
    scale: float | None = None
    experts: ExpertTraits | None = None
    xielu: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """A model.

    norm: "rms", "rms+1" (the checkpoint stores the weight minus 1), "rms, scale" (the weight may be
    called scale), "layer" (with a bias), "layer+1", "layer, no bias" or "layer, no weight" (nor a
    bias).
    after_offsets: what "rms+1" adds to the weights of names.after_attention and names.after_mlp.
    order: what each block does with its norm. "before": x + f(norm(x)). "after": x + norm(f(x)).
    "parallel": both blocks read norm(x). names.after_… can be given in addition to "before".
    row_order: of tensors that merge projections. "parts": all of Q, then K, then V. "groups": for
    each KV head its queries, its key and its value. "kv heads": Q is separate, and there is a key
    and a value for each KV head. qk_norm: "heads" normalizes each head, "own" each head with a
    weight of its own, "all" all heads of Q or K together, "rotated" each head after its rotation.
    qkv_limit: queries, keys and values are limited to ± this before they are rotated.
    transposed: matrices are stored [in, out].
    embedding_scale, residual_scale (of each block's result), logits_scale: factors. logits_cap:
    soft cap; soft_cap: of scores. alibi: slope of each head (Press et al. 2022); () = none.
    first_position: the row of the first position's vector (see `Names.positions`).
    passes: the stack of layers is computed this often, and normalized each time. Each pass has a KV
    cache of its own (Ouro). skips: (from, to, share): the input of layer `to` is share · (the input
    of layer `from`) + (1 - share) · its own.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    layers: tuple[LayerTraits, ...]
    ropes: tuple[RopeTraits, ...] = ()
    eps: float = 1e-6
    names: Names = field(default_factory=Names)
    norm: Literal[
        "rms", "rms+1", "rms, scale", "layer", "layer+1", "layer, no bias", "layer, no weight"
    ] = "rms"
    after_offsets: tuple[float, float] = (1.0, 1.0)
    order: Literal["before", "after", "parallel"] = "before"
    row_order: Literal["parts", "groups", "kv heads"] = "parts"
    qk_norm: Literal["", "heads", "own", "all", "rotated"] = ""
    activation: str = "silu"
    gated: bool = True
    transposed: bool = False
    qkv_bias: bool = False
    qkv_limit: float | None = None
    out_bias: bool = False
    up_bias: bool = False
    down_bias: bool = False
    head_bias: bool = False
    normalized_head: bool = False
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


def renamed(config: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """Return the config with values under the names of Llama's config. names: the new name = the
    config's. A value that the config has under Llama's name stays."""
    return {**{new: config[old] for new, old in names.items() if old in config}, **config}


def common(
    config: Mapping[str, Any], *, partial: float = 1.0, pairs: bool = False, **more: Any
) -> Traits:
    """Return the traits that a config in Llama's terms gives: sizes, windows of all layers, one
    rotary embedding. partial: share of each head that is rotated, if the config does not say. more:
    the other traits, which replace these. Raises ModelError if a value is missing or does not
    fit."""
    hidden_size = size_of(config, "hidden_size")
    num_heads = size_of(config, "num_attention_heads")
    num_kv_heads = read(config, "num_key_value_heads", int) or num_heads
    head_dim = read(config, "head_dim", int) or hidden_size // max(num_heads, 1)
    if num_heads < 1 or num_heads % num_kv_heads:
        raise ModelError(
            f"{num_heads} attention heads cannot share {num_kv_heads} heads of keys and values "
            "equally"
        )
    num_layers = size_of(config, "num_hidden_layers")
    width = size_of(config, "intermediate_size")
    base, scaling = rope_parameters(config)
    share = scaling.get("partial_rotary_factor", read(config, "partial_rotary_factor", float))
    rotated = int(head_dim * float(partial if share is None else share))
    values: dict[str, Any] = {
        "layers": (LayerTraits(num_kv_heads, width),) * num_layers,
        "ropes": (RopeTraits(base, scaling, rotated, pairs),),
        "eps": read(config, "rms_norm_eps", float) or 1e-6,
        "activation": read(config, "hidden_act", str) or "silu",
        "is_tied": bool(read(config, "tie_word_embeddings", bool)),
        **more,
    }
    return Traits(
        hidden_size=hidden_size,
        num_heads=num_heads,
        head_dim=head_dim,
        vocab_size=size_of(config, "vocab_size"),
        max_positions=read(config, "max_position_embeddings", int) or 2048,
        **values,
    )


def types_of_layers(config: Mapping[str, Any], default: str | list[str]) -> list[str]:
    """Return `layer_types`, for each layer "full_attention" or "sliding_attention". default: if the
    config has none; one word is for all layers. Raises ModelError if there are too few."""
    count = size_of(config, "num_hidden_layers")
    types = read(config, "layer_types", list[str]) or (
        [default] * count if isinstance(default, str) else default
    )
    if len(types) < count or not {"full_attention", "sliding_attention"}.issuperset(types):
        raise ModelError(
            f"layer_types has {len(types)} entries for {count} layers: "
            f"{sorted(map(str, set(types)))}; expected one for each layer, full_attention or "
            "sliding_attention"
        )
    return types[:count]


def refuse(config: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise ModelError if the config has one of these names with another value. expected: the value
    that the model computes."""
    for name, value in expected.items():
        if config.get(name) not in (None, value):
            raise ModelError(
                f"the checkpoint's config has {name}={config[name]!r}; this architecture is "
                f"served with {value!r} only"
            )
