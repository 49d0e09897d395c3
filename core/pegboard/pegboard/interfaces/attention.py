"""Kind `attention`: attention over the paged KV cache. A backend is chosen per layer group by
capability; each KV group has one instance (W).

The backend says what a layer stores (`kv_spec`). Core groups the layers with equal specs, allocates
one pool of equal-sized blocks and hands the backend views of it. Shape letters: T tokens, B rows, H
heads, K KV heads, D head_dim.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from pegboard.interfaces.spec import BATCH_INVARIANT, Need, Spec

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from pegboard.config.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(Spec):
    """supports: dtype, kv_dtype, head_dim (set), block_size (Multiple); window, chunk, sinks and
    soft_cap are True if the backend can do them (see `AttentionLayer`).
    latent: the types in which it can store the latents of latent attention, where kv_dtype does not
    count. sparse: True if it can choose keys by an index (see `SparseIndex`). encoder: True if it
    can compute layers whose tokens attend to those after them, where kv_dtype does not count (see
    `AttentionLayer`). Keys and values are then stored in the compute type, if at all.
    distance_bias: True if these may have one. part: True if it can attend to a part of the keys
    (see `AttentionLayer`). items: True if its tokens can attend to the end of their item (see
    `AttentionLayer`).

    flags: "replay" = bound calls can be recorded. Of a step, they then read only the tensors of
    `AttentionInputs` and memory that `plan` fills in place. "batch_invariant" = it can be so (see
    `spec.BATCH_INVARIANT`), and is if `AttentionSetup.batch_invariant` says so.
    """

    FLAGS = frozenset({"replay", BATCH_INVARIANT})


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeed(Need):
    dtype: str | None = None
    kv_dtype: str | None = None
    latent: str | None = None
    head_dim: int | None = None
    window: bool = False
    chunk: bool = False
    sinks: bool = False
    soft_cap: bool = False
    sparse: bool = False
    encoder: bool = False
    distance_bias: bool = False
    part: bool = False
    items: bool = False
    block_size: int | None = None


# --- retention rules and what a layer stores: plain values that cross processes -------------------


class Full(msgspec.Struct, frozen=True, tag=True):
    """Every token is kept until the request ends."""


class Window(msgspec.Struct, frozen=True, tag=True):
    """Only the last `tokens` tokens and the first `sinks` tokens are needed. Older blocks may be
    dropped."""

    tokens: int
    sinks: int = 0


class Chunk(msgspec.Struct, frozen=True, tag=True):
    """A token attends only within its chunk of `tokens` tokens. Blocks of earlier chunks may be
    dropped."""

    tokens: int


class State(msgspec.Struct, frozen=True, tag=True):
    """A request has one state instead of a slot per token. checkpoint_every: the state is saved
    every this many tokens for the prefix cache; 0 = never. takes_drafts: a second state is stored,
    the one before the drafts of a step."""

    checkpoint_every: int = 0
    takes_drafts: bool = False


class Encoder(msgspec.Struct, frozen=True, tag=True):
    """The layer stores the output of an encoder and not the tokens of the prompt: at most `tokens`
    rows, from the request's first step until its end."""

    tokens: int


Retain = Full | Window | Chunk | State | Encoder


class KVTensor(msgspec.Struct, frozen=True):
    """One tensor of a layer's cache. shape: of one slot, for example (K, D). dtype: torch name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return math.prod(self.shape) * self.item_bytes()

    def item_bytes(self) -> int:
        """Bytes of one number."""
        # "bfloat16" has 16 bits, "float8_e4m3fn" has 8
        return int(re.findall(r"\d+", self.dtype)[0]) // 8


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one layer stores. unit: it has one slot per "token" or one per "request". ranks: of
    which each stores an equal part of the tokens of a block. Core sets it."""

    tensors: tuple[KVTensor, ...]
    retain: Retain = Full()
    unit: Literal["token", "request"] = "token"
    block_size_multiple: int = 1
    ranks: int = 1

    def slot_bytes(self) -> int:
        """Bytes of one slot over all tensors."""
        return sum(tensor.slot_bytes() for tensor in self.tensors)


class KVGroup(msgspec.Struct, frozen=True):
    """Layers that share block tables. layers: their indices. spec: what each of them stores.
    block_size: tokens per block."""

    layers: tuple[int, ...]
    spec: KVCacheSpec
    block_size: int

    @property
    def num_slots(self) -> int:
        """Slots per block of a rank."""
        return self.block_size // self.spec.ranks if self.spec.unit == "token" else 1


class KVPlan(msgspec.Struct, frozen=True):
    """The KV cache of a rank. The engine's plan has the layers of all pipeline stages. num_blocks:
    blocks in the one pool. block_bytes: bytes of a block, on the stage that stores most in it.
    hash_block_size: tokens per hashed block. identity: a digest of everything that determines the
    content of a block, except its tokens and adapter: the checkpoint, its config, the compute type,
    the parallel sizes, and what the attention backends store and how. All block hashes depend on
    it. facts: the same in words, name → text, so that two engines can say in what they differ.
    Equal facts do not mean equal identities. Both describe the engine as it started: after a weight
    update, the hashes depend on the new weights too.
    """

    groups: tuple[KVGroup, ...]
    num_blocks: int
    block_bytes: int
    hash_block_size: int
    identity: str = ""
    facts: dict[str, str] = {}


# --- the layer, the views and the step ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SparseIndex:
    """How a layer with latent attention chooses the keys that a query attends to (DeepSeek-AI 2025,
    "DeepSeek-V3.2"). Each token also stores an index key i [head_dim]. A query has index vectors
    x_h [head_dim] of num_heads heads, and their weights w_h. A key's score is the sum of w_h max(0,
    x_h · i). The query attends to the top_k visible keys with the best scores."""

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(eq=False, slots=True)
class Latent:
    """The up-projections of a layer with latent attention (MLA, DeepSeek-AI 2024, "DeepSeek-V2").
    They are set when weights are loaded, in the type of weights that are not quantized. Letters: C
    channels of a latent, R rotated channels, N other channels of a key, V of a value.

    A token stores one latent c [C] and one part of its keys r [R], which all H heads share. The key
    of head h is (up_k[h] c, r) and its value is up_v[h]ᵀ c. A backend may compute them
    (*expanded*), or multiply the queries with up_k and the results with up_v (*absorbed*); then (c,
    r) is the only key and c the only value. up_k: [H, N, C]. up_v: [H, C, V]. index: None = a query
    attends to all visible keys.
    """

    up_k: "Tensor | None" = None
    up_v: "Tensor | None" = None
    index: SparseIndex | None = None

    def matrices(self) -> "tuple[Tensor, Tensor]":
        """Return (up_k, up_v)."""
        assert self.up_k is not None and self.up_v is not None, "weights are not loaded"
        return self.up_k, self.up_v

    def tensors(self) -> "list[Tensor]":
        """Return the memory that the weights take."""
        return list(self.matrices())


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """One attention layer of the model. scale: factor of q·k. window: in tokens, including the
    current one. chunk: in tokens; a token at position p attends to the positions from p − p mod
    chunk (Meta 2025, Llama 4). A layer has a window, a chunk or neither. shares_kv_with: the layer
    whose cache this layer reads; it then writes none. value_dim: channels of a value; None =
    head_dim. exact_keys: the cache must store floats of at least 16 bits. encoder: attention
    is bidirectional within the request (with a window, window // 2 tokens to each side). A step has
    all tokens of the request, so they need not be stored. latent: set for latent attention.
    Such a layer has one KV head, head_dim = C + R and value_dim = C.

    distance_bias: float32 [H, 2 R + 1], of encoder layers. The score of head h, after the scale,
    gets distance_bias[h, R + d] added, where d is the place of the key minus that of the query,
    limited to ± R (Raffel et al. 2020, "T5"). It is written in place when weights are loaded.

    encoder_tokens: of cross attention, the most rows that the output of the encoder has (Vaswani et
    al. 2017, section 3.2.3). A token attends to all rows of its request. They are stored by a call
    of their own, whose results nobody reads. In a step, every token is a row with one token, its
    seq_len is the number of rows, and no slot is written.

    sinks: float32 [H], written in place when weights are loaded. The softmax of head h has one more
    score, sinks[h], whose value is zero (OpenAI 2025, gpt-oss). soft_cap does not change it.

    k_scale, v_scale: float32 [K], positive, given exactly if the cache stores 8-bit floats. The
    cache stores k / k_scale, rounded to the nearest code, and the largest code for what is larger;
    a code means code · k_scale. Values likewise. They are written in place when weights are loaded,
    so a backend keeps the tensors and not their numbers.

    sees_items: a token of an image may attend to the tokens of the image after it, too. Then the
    step says how many keys it attends to (see `AttentionInputs`). A window or chunk still decides
    which key is the first one.

    is_part: the cache has only some of a request's tokens, and other ranks have the others (see
    `AttentionInputs`). The bound attention returns (out [T, H, Dv], lse float32 [T, H]), where lse
    is the log of the sum of exp(score) over these keys. Without keys it is −∞, and out is 0. With
    `latent`, the callable is (q [T, H, C + R], latent [T, C], rotated part of the key [T, R]) →
    (out [T, H, C], lse), where q is multiplied with up_k already, and out is not with up_v.
    """

    layer_index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    sinks: "Tensor | None" = field(default=None, compare=False)
    soft_cap: float | None = None
    shares_kv_with: int | None = None
    value_dim: int | None = None
    latent: Latent | None = field(default=None, compare=False)
    exact_keys: bool = False
    encoder: bool = False
    distance_bias: "Tensor | None" = field(default=None, compare=False)
    encoder_tokens: int | None = None
    k_scale: "Tensor | None" = field(default=None, compare=False)
    v_scale: "Tensor | None" = field(default=None, compare=False)
    is_part: bool = False
    sees_items: bool = False

    @property
    def result_dim(self) -> int:
        """Channels of each head of what the bound attention returns."""
        if self.latent is not None:
            return self.latent.matrices()[1].shape[-1]
        return self.value_dim or self.head_dim

    @property
    def retain(self) -> Retain:
        """What later tokens still read of the layer's cache."""
        if self.encoder:
            return Full()
        if self.encoder_tokens is not None:
            return Encoder(self.encoder_tokens)
        if self.chunk is not None:
            return Chunk(self.chunk)
        return Full() if self.window is None else Window(self.window)


KVView = Mapping[str, Any]
"""Named tensors that are views of one layer's raw block memory, each [num_blocks, block_size,
*KVTensor.shape]."""


@dataclass(slots=True)
class AttentionInputs:
    """One step of one KV group. The tensors are views of the worker's persistent buffers, so their
    addresses are stable. The `_cpu` arrays are numpy arrays.

    Rows are in execution order, with decodes (query_len ≤ 1 + drafts) first. A replayed step may be
    padded. Then the tensors and arrays are longer than num_rows and num_tokens: the extra rows have
    no tokens and seq_len 0, and the extra tokens have slot −1.

    query_start_loc: [B+1]. seq_lens: [B], in tokens, including those of this step. block_table: [B,
    max_blocks] int32; 0, the null block, where tokens left the window or chunk and are not kept.
    slot_mapping: [T] int64, block_id * block_size + offset; −1 = do not store.

    If the cache has only a part of each request's tokens, seq_lens counts these. A token of the
    step attends to the first `num_keys` of its request: int32 [T], which never becomes smaller from
    one token of a row to the next. None = it attends to all tokens up to itself. Layers with
    `sees_items` get it in steps where a token attends to a later one; such a row has at least two
    tokens.
    """

    num_rows: int
    num_tokens: int
    query_start_loc: "Tensor"
    query_start_loc_cpu: "np.ndarray"
    seq_lens: "Tensor"
    seq_lens_cpu: "np.ndarray"
    block_table: "Tensor"
    block_table_cpu: "np.ndarray"
    slot_mapping: "Tensor"
    num_keys: "Tensor | None" = None
    num_keys_cpu: "np.ndarray | None" = None


@dataclass(frozen=True, slots=True)
class AttentionSetup:
    """layers: of this group. dtype: of activations. limits: of one step. kernels: bound ops by
    name. batch_invariant: see `AttentionSpec`."""

    layers: tuple[AttentionLayer, ...]
    dtype: str
    device: str
    limits: "Limits"
    num_threads: int = 1
    kernels: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    batch_invariant: bool = False


class AttentionBackend(Protocol):
    """The attention of one KV group. The order of calls is: kv_spec (on the class) → constructor →
    attach → bind once per layer → plan once per step → bound calls. For the memory profile, core
    builds a backend with a single block. It builds another one for the real cache."""

    @staticmethod
    def kv_spec(layer: AttentionLayer, dtype: str) -> KVCacheSpec:
        """Return what `layer` stores. dtype: torch name of the type in which keys and values are
        stored."""

    def attach(self, views: Mapping[int, KVView], block_size: int) -> None:
        """Hand over the cache, once. `views[layer_index]` holds the layer's named tensors.
        block_size: in tokens.

        Slots that were never written may hold NaN, because layers share the memory of blocks. They
        must not reach a result: 0 · NaN is NaN, so their values have to be left out or replaced,
        and a softmax weight of 0 is not enough.
        """

    def bind(self, layer: AttentionLayer) -> "Callable[..., Tensor]":
        """Return the layer's callable (q [T, H, D], k [T, K, D], v [T, K, Dv]) → [T, H * Dv]. It
        writes k and v to the cache and then attends under the current plan. k and v are None if the
        layer shares another layer's cache. Hot: it is called for every layer in every step. For
        latent attention, the callable is (q [T, H, N], rotated part of q [T, H, R], latent [T, C],
        rotated part of the key [T, R]) → [T, H * V], and writes the last two. With an index, it
        also takes the index vectors [T, num_heads, head_dim], their weights float32 [T, num_heads],
        and the index key [T, head_dim], and writes the last."""

    def plan(self, inputs: AttentionInputs) -> None:
        """Derive what all layers of the group share. Called once per step, before the forward.
        `inputs` stays valid until the next plan."""
