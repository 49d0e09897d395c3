"""The attention backend `cpu_native`: compiled paged attention. Each KV group has one instance.

The kernels (csrc/attention*.c) use their own cache layout. They treat the views from core as plain
memory: [block, KV head, head_dim, slot] for keys and [block, KV head, slot, head_dim] for values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import PYFUNCTYPE, addressof, c_int32, c_void_p, sizeof
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.errors import ModelError
from pegboard.interfaces.attention import (
    AttentionInputs,
    AttentionLayer,
    AttentionSetup,
    KVCacheSpec,
    KVTensor,
    KVView,
)
from pegboard_kernel_cpu.attention_structs import (
    CACHE_TYPES,
    ENCODER,
    PIECES_PER_THREAD,
    QUANTIZED_BLOCK,
    SHARED_PIECES,
    TILE,
    UNITS,
    AttendArguments,
    Cache,
    FloatAttendArguments,
    Item,
    Plan,
    StoreArguments,
)
from pegboard_kernel_cpu.library import library
from pegboard_kernel_cpu.values import Call, Turn, Value, new, rows_of, submit

if TYPE_CHECKING:
    from torch import Tensor

_PLAN = PYFUNCTYPE(None, c_void_p, *[c_int32] * 6)
"""The type of the C function that plans a step. The call keeps the interpreter lock, because it
takes only a few microseconds. The step's program runs next and releases the lock."""


class NativeAttention:
    """The attention of one KV group."""

    def __init__(self, options: None, setup: AttentionSetup) -> None:
        self.library = library()
        self.layers = setup.layers
        first = setup.layers[0]
        self.head_dim = first.head_dim
        self.num_kv_heads = first.num_kv_heads
        self.group = self.rows_of_token(setup.layers)
        windows = [layer.window for layer in setup.layers]
        self.window = 0 if None in windows else max(window or 0 for window in windows)
        chunks = {layer.chunk for layer in setup.layers}
        self.chunk = ENCODER if first.encoder else (first.chunk or 0) if len(chunks) == 1 else 0
        self.num_threads = self.library.num_threads
        self.most_pieces = (
            0
            if setup.batch_invariant
            else -(-2 * PIECES_PER_THREAD * self.num_threads // self.num_kv_heads) + SHARED_PIECES
        )
        self.views: Mapping[int, KVView] = {}
        self.block_size = 0
        self.current = Plan()
        self.inputs: AttentionInputs | None = None
        self._make_room(setup.limits.max_num_batched_tokens)
        tile_rows = max(1, TILE // self.group) * self.group
        value_dim = first.value_dim or first.head_dim
        self.current.partial_stride = tile_rows * (value_dim + 2)
        self.partials = np.empty(
            self.most_pieces * self.num_kv_heads * self.current.partial_stride, np.float32
        )
        self.current.partials = self.partials.ctypes.data
        self.finished = np.zeros(self.most_pieces * self.num_kv_heads, np.int32)
        self.current.finished = self.finished.ctypes.data
        self._fill = _PLAN(self.library.address("attention_plan"))

    @staticmethod
    def rows_of_token(layers: Sequence[AttentionLayer]) -> int:
        """Return how many query rows of a tile each token takes: the heads that share a KV head."""
        return max(layer.num_heads // layer.num_kv_heads for layer in layers)

    def _make_room(self, num_tokens: int) -> None:
        """Allocate the items of a step of up to `num_tokens` tokens. Each item has at least one
        token, and some items are cut into pieces."""
        self.capacity = num_tokens
        self.items = np.empty((num_tokens + self.most_pieces) * sizeof(Item), np.uint8)
        self.members = np.empty(num_tokens, np.int32)
        self.current.items = self.items.ctypes.data
        self.current.members = self.members.ctypes.data

    @staticmethod
    def kv_spec(layer: AttentionLayer, dtype: str) -> KVCacheSpec:
        """For int8, the cache also stores one float32 scale per token and KV head for the keys, and
        one for the values."""
        if layer.value_dim not in (None, layer.head_dim):
            raise ModelError(
                f"attention layer {layer.layer_index} has values of {layer.value_dim} channels "
                f"and keys of {layer.head_dim}; cpu_native needs both to be equal: choose another "
                "attention backend, for example --attention-backend cpu_paged"
            )
        shape = (layer.num_kv_heads, layer.head_dim)
        tensors = [KVTensor("k", shape, dtype), KVTensor("v", shape, dtype)]
        if dtype == "int8":
            tensors += [
                KVTensor(name, (layer.num_kv_heads,), "float32") for name in ("k_scale", "v_scale")
            ]
        return KVCacheSpec(tensors=tuple(tensors), retain=layer.retain, block_size_multiple=16)

    def attach(self, views: Mapping[int, KVView], block_size: int) -> None:
        self.views = views
        self.block_size = block_size

    def plan(self, inputs: AttentionInputs) -> None:
        if inputs.num_tokens > self.capacity:
            self._make_room(inputs.num_tokens)
        self.inputs = inputs  # keep them alive: the plan points to their memory
        plan = self.current
        table = inputs.block_table
        plan.num_rows = inputs.num_rows
        plan.block_size = self.block_size
        plan.query_start_loc = inputs.query_start_loc.data_ptr()
        plan.seq_lens = inputs.seq_lens.data_ptr()
        plan.block_table = table.data_ptr()
        plan.table_stride = table.stride(0)
        plan.slot_mapping = inputs.slot_mapping.data_ptr()
        plan.num_keys = None if inputs.num_keys is None else inputs.num_keys.data_ptr()
        self._fill(
            addressof(plan),
            self.num_threads,
            self.num_kv_heads,
            self.group,
            self.window,
            self.chunk,
            self.most_pieces,
        )

    def bind(self, layer: AttentionLayer) -> Callable[..., Any]:
        return (PartOfKeys if layer.is_part else NativeLayer)(self, layer)

    def cache(self, owner: int) -> Cache:
        """Return the addresses and strides of the cache of layer `owner`."""
        view = self.views[owner]
        cache = Cache()
        for name, tensor in view.items():
            setattr(cache, name, tensor.data_ptr())
            setattr(cache, f"{name}_stride", tensor.stride(0) * tensor.element_size())
        cache.num_kv_heads = self.num_kv_heads
        cache.head_dim = self.head_dim
        cache.block_size = self.block_size
        cache.type = CACHE_TYPES[name_of_type(view["k"])]
        return cache


def name_of_type(tensor: Tensor) -> str:
    """Return "float32" for torch.float32."""
    return str(tensor.dtype).removeprefix("torch.")


class NativeLayer:
    """One bound layer. It is called eagerly, or recorded into a program."""

    def __init__(self, backend: NativeAttention, layer: AttentionLayer) -> None:
        self.backend = backend
        self.layer = layer
        self.is_owner = layer.shares_kv_with is None
        owner = layer.layer_index if layer.shares_kv_with is None else layer.shares_kv_with
        self.cache = backend.cache(owner)
        if layer.k_scale is not None and layer.v_scale is not None:
            self.cache.k_scale = layer.k_scale.data_ptr()
            self.cache.v_scale = layer.v_scale.data_ptr()
        self.stored = name_of_type(backend.views[owner]["k"])

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None) -> Any:
        turn: Turn | None = None
        if type(q) is Value:
            (q, k), turn = q.recorder.take_turn(q, k)
        q = rows_of(q)
        calls = []
        reads = {"q": q} if k is None else {"q": q, "k": rows_of(k), "v": rows_of(v)}
        if turn is not None:
            reads |= {"cos": turn.cos, "sin": turn.sin}
        if len(reads) > 1:
            store = self._store_arguments(turn, stores=k is not None)
            calls.append(Call("rope_store", store, reads, {} if turn is None else {"q": q}))
        out = new(q, self.layer.num_heads * self.layer.head_dim)
        submit(q, *calls, Call("attend", self.attend_arguments(), {"q": q}, {"out": out}, self))
        if turn is not None:
            q.recorder.spend(q)
        return out

    def _store_arguments(self, turn: Turn | None, stores: bool) -> StoreArguments:
        """Return the arguments of the call that stores k and v in the cache. It also rotates q (in
        place) and k, as `turn` says."""
        return StoreArguments(
            plan=addressof(self.backend.current),
            cache=self.cache,
            num_heads=self.layer.num_heads,
            rotary_pairs=0 if turn is None else turn.cos.shape[1],
            pairs=turn is not None and turn.pairs,
            stores=stores,
        )

    def attend_arguments(self) -> AttendArguments | FloatAttendArguments:
        group = self.layer.num_heads // self.layer.num_kv_heads
        make = (
            FloatAttendArguments
            if group * self.layer.head_dim % QUANTIZED_BLOCK
            else AttendArguments
        )
        unit = UNITS.get(self.stored, 1.0)
        return make(
            plan=addressof(self.backend.current),
            cache=self.cache,
            num_heads=self.layer.num_heads,
            sinks=None if self.layer.sinks is None else self.layer.sinks.data_ptr(),
            window=self.layer.window or 0,
            chunk=ENCODER if self.layer.encoder else self.layer.chunk or 0,
            scale=self.layer.scale * unit,
            soft_cap=self.layer.soft_cap or 0.0,
            value_unit=unit,
        )


class PartOfKeys(NativeLayer):
    """A layer whose cache has a part of the keys (see `AttentionLayer`). It is not recorded."""

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None) -> Any:
        rows = rows_of(q)
        calls = []
        if k is not None:
            reads = {"q": rows, "k": rows_of(k), "v": rows_of(v)}
            calls.append(Call("rope_store", self._store_arguments(None, stores=True), reads, {}))
        out = new(rows, rows.shape[1])
        lse = new(rows, self.layer.num_heads)
        writes = {"out": out, "lse": lse}
        attend = Call("attend", self.attend_arguments(), {"q": rows}, writes, self)
        submit(rows, *calls, attend)
        return out.view(q.shape), lse
