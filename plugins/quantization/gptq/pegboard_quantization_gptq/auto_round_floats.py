"""AutoRound checkpoints whose weights are small floats.

    fp, bits 8      weight float8 [out, in]   weight_scale [out] or [1]   input_scale [1]
    fp in blocks    weight float8 [out, in]   weight_scale_inv [out / a, in / b]
    mx_fp, bits 8   weight float8 [out, in]   weight_scale uint8 (exponents) [out, in / 32]
    mx_fp, bits 4   weight_packed uint8 [out, in / 2]   weight_scale as for 8 bits
    mx_int, bits 4  as mx_fp: a sign and steps of 0.25
    nv_fp, bits 4   weight_packed as for mx_fp   weight_scale float8 [out, in / 16]
                    weight_global_scale [1], which divides the scales

The name of the type may have more after it: mx_fp_rceil, nv_fp4_with_static_gs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import Part
from pegboard_weights.asked_rounding import AskedRounding
from pegboard_weights.config import QuantConfig
from pegboard_weights.small_floats import FloatReader, nibbles
from pegboard_weights.stored_weight import Pieces, tensor_of

FLOAT8 = "float8_e4m3fn"
MX_GROUP = 32
NV_GROUP = 16
QUARTERS = torch.arange(8) / 4
"""The magnitudes of mx_int."""
PACKINGS = (
    "auto_round",
    "auto_round:llm_compressor",
    "auto_round:fp8",
    "auto_round:fp8_static",
    "auto_round:mx_fp",
    "auto_round:mx_fp_rceil",
    "auto_round:mx_int",
    "auto_round:nv_fp",
    "auto_round:nv_fp4_with_static_gs",
    "auto_round:mxfp4",
    "auto_round:mxfp8",
    "auto_round:nvfp4",
)
"""Values of packing_format. The type of the weights says how they are stored."""
REFUSED = {
    "nvfp4_v2": "has scales of 5 bits of exponent and 3 of mantissa, which no other format has",
}
"""Types of weights that are not read, and why."""
KINDS = ("mx_fp", "mx_int", "nv_fp", "fp")


class QuarterReader(FloatReader):
    """Reads mx_int."""

    def _codes(self, pieces: Pieces, name: str) -> tuple[Tensor, Tensor]:
        return nibbles(tensor_of(pieces, name, torch.uint8)), torch.cat((QUARTERS, -QUARTERS))

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return ["quarters", *super().key(part, pieces)]


_MX8 = FloatReader(block=(1, MX_GROUP), scale_type="e8m0")
_MX4 = FloatReader(bits=4, block=(1, MX_GROUP), weight=("weight_packed",), scale_type="e8m0")
_MXINT = QuarterReader(bits=4, block=(1, MX_GROUP), weight=("weight_packed",), scale_type="e8m0")
_NV4 = replace(
    _MX4,
    block=(1, NV_GROUP),
    factor="weight_global_scale",
    is_divisor=True,
    scale_type="e4m3",
)
READERS: Mapping[tuple[str, int], FloatReader] = {
    ("mx_fp", 4): _MX4,
    ("mx_fp", 8): _MX8,
    ("mx_int", 4): _MXINT,
    ("nv_fp", 4): _NV4,
}


def is_float(config: QuantConfig) -> bool:
    """Return whether the weights are small floats, or integers with exponents as scales."""
    kind = config.values.get("data_type")
    return isinstance(kind, str) and kind.startswith((*KINDS, *REFUSED))


def float_reader(config: QuantConfig) -> FloatReader:
    """Return the reader of weights that `is_float`. Raises ModelError if it is not known."""
    name = str(config.values["data_type"])
    if name in REFUSED:
        raise ModelError(
            f"the checkpoint's quantization_config has {config.place}data_type={name!r}, which "
            f"{REFUSED[name]}; export it as nv_fp or mx_fp"
        )
    kind = next(kind for kind in KINDS if name.startswith(kind))
    if kind != "fp":
        bits = config.one_of("bits", [bits for known, bits in READERS if known == kind])
        reader = READERS[kind, bits]
        assert reader.block is not None
        config.one_of("group_size", (reader.block[1],), reader.block[1])
        return reader
    config.one_of("bits", (8,))
    config.one_of("sym", (True,), True)
    if isinstance(config.values.get("group_size"), list | tuple):
        return FloatReader(block=config.block("group_size"), scale=("weight_scale_inv",))
    config.one_of("group_size", (0, -1), -1)
    return FloatReader()


def float_rounding(config: QuantConfig) -> AskedRounding | None:
    """Return how activations are rounded. None = they are not, or in a way that is not computed:
    4 bits, and exponents as scales."""
    values = config.values
    size = values.get("act_group_size")
    kinds = (str(values.get(name, "")) for name in ("data_type", "act_data_type"))
    if values.get("act_bits") != 8 or not all(kind.startswith("fp") for kind in kinds):
        return None
    if values.get("act_dynamic") is False:
        return AskedRounding(FLOAT8, is_static=True) if size == 0 else None
    if size in (0, -1):
        return AskedRounding(FLOAT8, is_shared=size == 0)
    is_group = type(size) is int and size > 0 and size % 32 == 0
    return AskedRounding(FLOAT8, int(str(size))) if is_group else None
