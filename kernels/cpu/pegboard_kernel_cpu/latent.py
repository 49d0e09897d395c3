"""The attention backend `cpu_mla`: compiled latent attention over the paged cache. Prompts and
decodes read the latents themselves (see `Latent`: absorbed)."""

from __future__ import annotations

from ctypes import Structure, addressof, c_float, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING

from pegboard.interfaces.attention import AttentionLayer, KVCacheSpec, KVTensor
from pegboard_kernel_cpu.attention import NativeAttention
from pegboard_kernel_cpu.attention_structs import CACHE_TYPES
from pegboard_kernel_cpu.values import Call, Turn, Value, new, rows_of, submit

if TYPE_CHECKING:
    from torch import Tensor

MOST_CHANNELS = 1024
CODES_PER_SCALE = 128
FP8_DS_MLA = len(CACHE_TYPES)


class LatentCache(Structure):
    _fields_ = [
        ("latents", c_void_p),
        ("stride", c_int64),
        *((name, c_int32) for name in ("rank", "rope", "block_size", "type")),
    ]


class HeadProducts(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "out")),
        *((name, c_int64) for name in ("x_stride", "out_stride", "x_head", "out_head")),
        ("weight", c_void_p),
        *((name, c_int64) for name in ("rows", "columns")),
        *((name, c_int32) for name in ("num_heads", "type")),
    ]


class LatentStore(Structure):
    _fields_ = [
        ("absorbed", HeadProducts),
        *((name, c_void_p) for name in ("q_rope", "latent", "k_rope")),
        *(
            (name, c_int64)
            for name in ("q_rope_stride", "q_rope_head", "latent_stride", "k_rope_stride")
        ),
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, c_int64) for name in ("cos_stride", "sin_stride")),
        ("plan", c_void_p),
        ("cache", LatentCache),
        ("pairs", c_int32),
    ]


class LatentArguments(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("q", "out")),
        *((name, c_int64) for name in ("q_stride", "out_stride")),
        ("plan", c_void_p),
        ("cache", LatentCache),
        ("num_heads", c_int32),
        ("scale", c_float),
    ]


class NativeLatentAttention(NativeAttention):
    """The latent attention of one KV group. Its plan is that of a layer with one KV head."""

    @staticmethod
    def kv_spec(layer: AttentionLayer, dtype: str) -> KVCacheSpec:
        """A token stores (c, r) in the type `dtype`. fp8_ds_mla is vLLM's layout for DeepSeek: C
        codes of float8_e4m3fn, a float32 scale for each 128 of them (their largest magnitude /
        448), and r in bfloat16."""
        rank = layer.value_dim or 0
        width = layer.head_dim
        if dtype == "fp8_ds_mla":
            dtype = "uint8"
            width = rank + 4 * -(-rank // CODES_PER_SCALE) + 2 * (layer.head_dim - rank)
        return KVCacheSpec(tensors=(KVTensor("latent", (width,), dtype),), retain=layer.retain)

    def bind(self, layer: AttentionLayer) -> "NativeLatentLayer":  # type: ignore[override]
        return NativeLatentLayer(self, layer)


class NativeLatentLayer:
    """One bound layer. It is called eagerly, or recorded into a program."""

    def __init__(self, backend: NativeLatentAttention, layer: AttentionLayer) -> None:
        assert layer.latent is not None and layer.value_dim is not None
        self.backend = backend
        self.layer = layer
        self.up_k, self.up_v = layer.latent.matrices()
        self.rank = layer.value_dim
        view = backend.views[layer.layer_index]["latent"]
        stored = str(view.dtype).removeprefix("torch.")
        self.cache = LatentCache(
            latents=view.data_ptr(),
            stride=view.stride(0) * view.element_size(),
            rank=self.rank,
            rope=layer.head_dim - self.rank,
            block_size=backend.block_size,
            type=FP8_DS_MLA if stored == "uint8" else CACHE_TYPES[stored],
        )

    def __call__(self, q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
        turn: Turn | None = None
        if type(q) is Value:
            (q_rope, k_rope), turn = q.recorder.take_turn(q_rope, k_rope)
        queries = new(q, self.layer.num_heads * self.layer.head_dim)
        q, q_rope = (x if x.stride(2) == 1 else x.contiguous() for x in (q, q_rope))
        reads = {
            "absorbed.x": q,
            "q_rope": q_rope,
            "latent": rows_of(latent),
            "k_rope": rows_of(k_rope),
        }
        if turn is not None:
            reads |= {"cos": turn.cos, "sin": turn.sin}
        store = LatentStore(
            absorbed=self._products(self.up_k, q.stride(1), self.layer.head_dim),
            q_rope_head=q_rope.stride(1),
            plan=addressof(self.backend.current),
            cache=self.cache,
            pairs=turn is not None and turn.pairs,
        )
        sums = new(q, self.layer.num_heads * self.rank)
        attend = LatentArguments(
            plan=addressof(self.backend.current),
            cache=self.cache,
            num_heads=self.layer.num_heads,
            scale=self.layer.scale,
        )
        width = self.up_v.shape[2]
        out = new(q, self.layer.num_heads * width)
        submit(
            q,
            Call("latent_store", store, reads, {"absorbed.out": queries}, self),
            Call("attend_latent", attend, {"q": queries}, {"out": sums}, self),
            Call(
                "head_products",
                self._products(self.up_v, self.rank, width),
                {"x": sums},
                {"out": out},
                self,
            ),
        )
        return out

    def _products(self, weight: Tensor, x_head: int, out_head: int) -> HeadProducts:
        """Return the product with an up-projection [H, rows, columns]. x_head, out_head: floats
        from head to head."""
        num_heads, rows, columns = weight.shape
        return HeadProducts(
            x_head=x_head,
            out_head=out_head,
            weight=weight.data_ptr(),
            rows=rows,
            columns=columns,
            num_heads=num_heads,
            type=CACHE_TYPES[str(weight.dtype).removeprefix("torch.")],
        )
