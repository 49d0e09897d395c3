"""The C structures of csrc/ for ctypes, with the same fields in the same order."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_uint64, c_void_p


class Step(Structure):
    _fields_ = (("num_tokens", c_int64),)


class Instruction(Structure):
    _fields_ = (("kernel", c_void_p), ("arguments", c_void_p))


class Beside(Structure):
    _fields_ = tuple((name, c_void_p) for name in ("kernel", "arguments", "count", "run", "others"))


E4M3_UNIT = 2.0**8
"""What the kernels read of E4M3 codes is to be multiplied with this (csrc/common.h)."""


WORDS_GAP = 32
"""Columns between two tokens' activations as bfloat16 numbers (csrc/quantize.h)."""


class Quantized(Structure):
    _fields_ = tuple((name, c_void_p) for name in ("codes", "scales", "sums", "words"))


class Quantize(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("to", Quantized),
        ("columns", c_int64),
        ("order", c_void_p),
        ("group", c_int64),
        ("scale", c_float),
    )


class LinearFloat(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("x_words", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("type", c_int64),
    )


class ExpertsFloat(Structure):
    _fields_ = (
        ("common", LinearFloat),
        ("starts", c_void_p),
        ("experts", c_void_p),
        ("num_experts", c_int64),
    )


class Format(Structure):
    _fields_ = (
        ("bits", c_int32),
        ("block_size", c_int32),
        ("scale_type", c_int32),
        ("shift", c_int32),
        ("zero", c_int32),
        ("record_bytes", c_int32),
        ("outer", c_int32),
    )


class LinearBlocks(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_scales", c_void_p),
        ("x_sums", c_void_p),
        ("x_words", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("format", Format),
        ("is_whole", c_int32),
    )


class ExpertsBlocks(Structure):
    _fields_ = (
        ("common", LinearBlocks),
        ("starts", c_void_p),
        ("experts", c_void_p),
        ("num_experts", c_int64),
    )


class LookupBlocks(Structure):
    _fields_ = (
        ("ids", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("weight", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("format", Format),
    )


class CodeFormat(Structure):
    _fields_ = (
        ("bits", c_int32),
        ("kind", c_int32),
        ("scale_kind", c_int32),
        ("block_size", c_int32),
        ("outer", c_int32),
        ("factor", c_void_p),
        ("values", c_void_p),
        ("scales", c_void_p),
    )


class LinearCodes(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("x_words", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("is_invariant", c_int64),
        ("format", CodeFormat),
    )


class ExpertsCodes(Structure):
    _fields_ = (
        ("common", LinearCodes),
        ("starts", c_void_p),
        ("experts", c_void_p),
        ("num_experts", c_int64),
    )


class LookupCodes(Structure):
    _fields_ = (
        ("ids", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("weight", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("format", CodeFormat),
    )


class RMSNorm(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("residual", c_void_p),
        ("residual_stride", c_int64),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("to", Quantized),
        ("columns", c_int64),
        ("parts", c_int64),
        ("epsilon", c_float),
    )


class LayerNorm(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("residual", c_void_p),
        ("residual_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("to", Quantized),
        ("columns", c_int64),
        ("parts", c_int64),
        ("epsilon", c_float),
    )


class GatedActivation(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("to", Quantized),
        ("columns", c_int64),
        ("is_gelu", c_int64),
    )


class Hadamard(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("to", Quantized),
        ("columns", c_int64),
        ("size", c_int64),
    )


class Pointwise(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("x_outer", c_int64),
        ("x_step", c_int64),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("y_outer", c_int64),
        ("y_step", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("out_outer", c_int64),
        ("out_step", c_int64),
        ("outer", c_int64),
        ("columns", c_int64),
        ("kind", c_int64),
        ("factor", c_float),
    )


class RowMeans(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("x_outer", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("outer", c_int64),
        ("columns", c_int64),
    )


class Rotate(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("cos", c_void_p),
        ("cos_stride", c_int64),
        ("sin", c_void_p),
        ("sin_stride", c_int64),
        ("heads", c_int64),
        ("head_stride", c_int64),
        ("width", c_int64),
        ("rotary_pairs", c_int64),
        ("pairs", c_int64),
    )


class Streams(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("routed", c_void_p),
        ("routed_stride", c_int64),
        ("computed", c_void_p),
        ("computed_stride", c_int64),
        ("router", c_void_p),
        ("mixing", c_void_p),
        ("streams", c_int64),
        ("columns", c_int64),
        ("active", c_int64),
    )


class AddToStreams(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("streams", c_int64),
        ("columns", c_int64),
    )


class MatchMagnitude(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("like", c_void_p),
        ("x_stride", c_int64),
        ("like_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("columns", c_int64),
        ("least", c_float),
    )


class CutGates(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("columns", c_int64),
        ("cutoff", c_float),
    )


class TakeColumns(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("order", c_void_p),
        ("columns", c_int64),
    )


class Route(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("correction", c_void_p),
        ("weights", c_void_p),
        ("ids", c_void_p),
        ("num_experts", c_int64),
        ("top_k", c_int64),
        ("num_groups", c_int64),
        ("top_groups", c_int64),
        ("group_best", c_int64),
        ("score", c_int64),
        ("renormalize", c_int64),
        ("scale", c_float),
        ("spread", c_float),
    )


class ZeroExperts(Structure):
    _fields_ = (
        ("weights", c_void_p),
        ("ids", c_void_p),
        ("real_weights", c_void_p),
        ("real_ids", c_void_p),
        ("kept", c_void_p),
        ("num_experts", c_int64),
        ("top_k", c_int64),
    )


class SortByExpert(Structure):
    _fields_ = (
        ("ids", c_void_p),
        ("held", c_void_p),
        ("counts", c_void_p),
        ("places", c_void_p),
        ("starts", c_void_p),
        ("num_ids", c_int64),
        ("turns", c_int64),
        ("num_experts", c_int64),
        ("top_k", c_int64),
    )


class SpreadRows(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("places", c_void_p),
        ("factors", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("to", Quantized),
        ("columns", c_int64),
        ("top_k", c_int64),
    )


class SumExperts(Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("rows_stride", c_int64),
        ("places", c_void_p),
        ("weights", c_void_p),
        ("shared", c_void_p),
        ("shared_stride", c_int64),
        ("gate", c_void_p),
        ("gate_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("columns", c_int64),
        ("top_k", c_int64),
    )


class ClampedSwiglu(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("to", Quantized),
        ("columns", c_int64),
        ("interleaved", c_int64),
        ("alpha", c_float),
        ("limit", c_float),
    )


class Repeated(Structure):
    _fields_ = (("kernel", c_void_p), ("arguments", c_void_p), ("copies", c_int64))


class SampleTokens(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("rows", c_int64),
        ("vocabulary", c_int64),
        ("temperature", c_void_p),
        ("min_p", c_void_p),
        ("top_p", c_void_p),
        ("top_k", c_void_p),
        ("uniforms", c_void_p),
        ("ids", c_void_p),
        ("scratch", c_void_p),
        ("scratch_stride", c_int64),
    )


class LookupFloat(Structure):
    _fields_ = (
        ("ids", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("table", c_void_p),
        ("columns", c_int64),
    )


class LookupPacked(Structure):
    _fields_ = (
        ("ids", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("weight", c_void_p),
        ("columns", c_int64),
        ("type", c_int64),
    )


class Member(Structure):
    _fields_ = (
        ("shared", c_void_p),
        ("rank", c_int64),
        ("ranks", c_int64),
        ("timeout", c_int64),
        ("issued", c_uint64),
        ("done", c_int64),
    )


class Exchange(Structure):
    _fields_ = (
        ("member", c_void_p),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("columns", c_int64),
        ("item", c_int64),
        ("type", c_int64),
        ("source", c_int64),
    )


InstructionList = POINTER(Instruction)
