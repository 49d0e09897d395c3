"""The structures of csrc/attention.h for ctypes, with the same fields in the same order."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

from pegboard_kernel_cpu.structures import E4M3_UNIT, Quantized

TILE = 48
ENCODER = -1
PIECES_PER_THREAD = 4
SHARED_PIECES = 32
QUANTIZED_BLOCK = 32
CACHE_TYPES = {
    "float32": 0,
    "bfloat16": 1,
    "int8": 2,
    "float16": 3,
    "float8_e4m3fn": 4,
    "float8_e5m2": 5,
}
UNITS = {"float8_e4m3fn": E4M3_UNIT}
"""The kernels read numbers of these types divided by this."""


class Item(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("row", "first", "count", "key_first", "key_stop")),
        *((name, c_int32) for name in ("split", "num_splits", "partial", "merge", "pieces")),
        *((name, c_int32) for name in ("members", "num_members", "member")),
        ("work", c_float),
    ]


class Plan(Structure):
    _fields_ = [
        ("num_rows", c_int64),
        ("num_items", c_int64),
        ("block_size", c_int64),
        ("items", c_void_p),
        ("members", c_void_p),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("table_stride", c_int64),
        ("slot_mapping", c_void_p),
        ("num_keys", c_void_p),
        ("partials", c_void_p),
        ("partial_stride", c_int64),
        ("finished", c_void_p),
    ]


class Cache(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("k", "v", "k_scale", "v_scale")),
        *((name, c_int64) for name in ("k_stride", "v_stride", "k_scale_stride", "v_scale_stride")),
        *((name, c_int32) for name in ("num_kv_heads", "head_dim", "block_size", "type")),
    ]


class StoreArguments(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("q", "k", "v")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, c_int64) for name in ("cos_stride", "sin_stride")),
        ("plan", c_void_p),
        ("cache", Cache),
        *((name, c_int32) for name in ("num_heads", "rotary_pairs", "pairs", "stores")),
    ]


_ATTEND = [
    *((name, c_void_p) for name in ("q", "out")),
    *((name, c_int64) for name in ("q_stride", "out_stride")),
    ("plan", c_void_p),
    ("cache", Cache),
    ("lse", c_void_p),
    ("sinks", c_void_p),
    *((name, c_int32) for name in ("num_heads", "window", "chunk")),
    *((name, c_float) for name in ("scale", "soft_cap", "value_unit")),
]


class AttendArguments(Structure):
    """`to` is where the kernel also writes its result in quantized form, if that is wanted."""

    _fields_ = [*_ATTEND, ("to", Quantized)]


class FloatAttendArguments(Structure):
    """The same structure for a group of heads whose channels are not a multiple of 32. It has no
    field named `to`, so a recorder quantizes the result with a separate call."""

    _fields_ = [*_ATTEND, ("not_quantized", Quantized)]
