"""Kind `attention`: attention over the paged KV cache. Chosen per layer group by capability; one instance per KV group (W).

The backend says what a layer stores (`kv_spec`); core groups layers of equal spec, makes one pool of equal-sized blocks and
hands the backend views of it. Shape letters: T tokens, B rows, H heads, K KV heads, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from pegboard.interfaces.spec import Need, Spec

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from pegboard.config.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(Spec):
    """supports: dtype, kv_dtype, head_dim (set), kind (set of "decoder", "encoder", "cross", "mla"), window, sinks, soft_cap,
    alibi (True when it can), block_size (Multiple).

    flags: "replay" (bound calls can be recorded: of a step they read only the tensors of `AttentionInputs` and memory that
    `plan` fills in place)."""

    FLAGS = frozenset({"replay"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeed(Need):
    dtype: str | None = None
    kv_dtype: str | None = None
    head_dim: int | None = None
    kind: str | None = None
    window: bool = False
    sinks: bool = False
    soft_cap: bool = False
    alibi: bool = False
    block_size: int | None = None


# --- retention rules and what a layer stores: plain values, they cross processes -----------------------------------------


class Full(msgspec.Struct, frozen=True, tag=True):
    """Every token is kept until the request ends."""


class Window(msgspec.Struct, frozen=True, tag=True):
    """Only the last `tokens` tokens (and the first `sinks`) are needed; older blocks may be dropped."""

    tokens: int
    sinks: int = 0


class Chunk(msgspec.Struct, frozen=True, tag=True):
    """Attention inside chunks of `tokens`: blocks of earlier chunks may be dropped."""

    tokens: int


class State(msgspec.Struct, frozen=True, tag=True):
    """One state per request instead of a slot per token; checkpointed every n tokens for the prefix cache (0 = never);
    `draft_states` extra states hold the state after each draft."""

    checkpoint_every: int = 0
    draft_states: int = 0


Retain = Full | Window | Chunk | State


class KVTensor(msgspec.Struct, frozen=True):
    """One tensor of a layer's cache: shape per slot (e.g. (K, D)) and torch dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one layer stores. unit: a slot per "token", or one per "request"."""

    tensors: tuple[KVTensor, ...]
    retain: Retain = Full()
    unit: Literal["token", "request"] = "token"
    block_size_multiple: int = 1

    def slot_bytes(self) -> int:
        """Bytes of one slot over all tensors."""
        return sum(tensor.slot_bytes() for tensor in self.tensors)


DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float64": 8,
}


class KVGroup(msgspec.Struct, frozen=True):
    """Layers that share block tables: their indices, what each stores, and tokens per block."""

    layers: tuple[int, ...]
    spec: KVCacheSpec
    block_size: int


class KVPlan(msgspec.Struct, frozen=True):
    """The KV cache of a rank: groups, number of blocks in the one pool, bytes of a block, and tokens per hashed block."""

    groups: tuple[KVGroup, ...]
    num_blocks: int
    block_bytes: int
    hash_block_size: int


@dataclass(frozen=True, slots=True)
class KVQuantization:
    """A quantized KV cache: torch dtype name of the stored values, and scales per layer when the checkpoint has them."""

    dtype: str
    k_scale: float = 1.0
    v_scale: float = 1.0


# --- the layer, the views and the step ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """One attention layer of the model (this rank's heads). scale multiplies q·k. window counts tokens including the current
    one. alibi: slope per head. shares_kv_with: layer whose cache this layer reads (it writes none)."""

    layer_index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    sinks: bool = False
    soft_cap: float | None = None
    alibi: tuple[float, ...] | None = None
    kind: Literal["decoder", "encoder", "cross", "mla"] = "decoder"
    shares_kv_with: int | None = None
    value_dim: int | None = None


KVView = Mapping[str, Any]
"""Named tensors over the raw block memory of one layer: [num_blocks, block_size, *KVTensor.shape]."""


@dataclass(slots=True)
class AttentionInputs:
    """One step as one KV group sees it. Tensors are views of the worker's persistent buffers (stable addresses); `_cpu` arrays
    are numpy. Rows are in execution order, decodes (query_len ≤ 1 + drafts) first. A step that is replayed may be padded: tensors
    and arrays are then longer than num_rows and num_tokens, by rows of no tokens and seq_len 0, and tokens of slot −1.

    query_start_loc [B+1]; seq_lens [B] tokens including this step's; block_table [B, max_blocks] int32; slot_mapping [T]
    int64, block_id * block_size + offset, −1 = do not store.
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


@dataclass(frozen=True, slots=True)
class AttentionSetup:
    """layers of this group; dtype of activations; block_size in tokens; kernels: bound ops; limits of one step."""

    layers: tuple[AttentionLayer, ...]
    dtype: str
    device: str
    limits: "Limits"
    num_threads: int = 1
    kernels: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    quantization: KVQuantization | None = None


class AttentionBackend(Protocol):
    """One per KV group. Order: kv_spec (on the class) → constructor → attach → bind per layer → plan once per step → bound
    calls. A backend with one block is built for the memory profile, and another one for the real size."""

    @staticmethod
    def kv_spec(layer: AttentionLayer, dtype: str, quantization: KVQuantization | None) -> KVCacheSpec | None:
        """What `layer` stores; None = nothing (encoder-only)."""

    def attach(self, views: Mapping[int, KVView], block_size: int) -> None:
        """Once. `views[layer_index]`: the layer's named tensors."""

    def bind(self, layer: AttentionLayer) -> "Callable[[Tensor, Tensor | None, Tensor | None], Tensor]":
        """(q [T, H, D], k [T, K, D], v [T, K, Dv]) → [T, H * Dv]: writes k, v to the cache, then attends under the current plan.
        k and v are None for a layer that shares another layer's cache. Called per layer in a step: hot."""

    def plan(self, inputs: AttentionInputs) -> None:
        """Once per step, before the forward: derive what all layers of the group share. `inputs` stays valid until the next
        plan."""
