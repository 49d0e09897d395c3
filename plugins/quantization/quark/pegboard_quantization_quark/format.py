"""AMD Quark: 8-bit integers or floats with a scale per tensor or row, MXFP4 and MXFP6.

    int8       weight int8 [out, in]              weight_scale [out] or [1]    weight_zero_point
    int8 [out] or [1] fp8_e4m3   weight float8 [out, in]            weight_scale [out] or [1]
    fp4        weight uint8 [out, in / 2]         weight_scale uint8 (exponents of two) [out, in /
    32] fp6_e3m2, fp6_e2m3   weight uint8 [out, in · 3 / 4]   weight_scale as for fp4

A module has the config of the first pattern of `layer_quant_config` that matches its path, and else
`global_quant_config`. Modules in `exclude` are plain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pegboard.interfaces.quantization import EmbeddingLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import TensorEntry, WantedWeight
from pegboard.ops.blocks import Blocks
from pegboard_weights.config import QuantConfig, matches
from pegboard_weights.cuts import Grid
from pegboard_weights.grouped import block_form, check_whole_groups, signed_rows
from pegboard_weights.small_floats import FloatReader
from pegboard_weights.stored_weight import (
    AnyLayer,
    Form,
    FormatMethod,
    Pieces,
    Reader,
    columns_of,
    module_of,
    stored_as,
)

READING = "quark 1"
"""Part of the keys of the repack cache. Change it whenever the same tensors are read as other
values."""

METHOD = "Quark"
MX_GROUP = 32
SCHEMES = {
    "int8": ("per_tensor", "per_channel"),
    "fp8_e4m3": ("per_tensor", "per_channel"),
    "fp4": ("per_group",),
    "fp6_e3m2": ("per_group",),
    "fp6_e2m3": ("per_group",),
}
"""Types of weights, and how their scales may be arranged."""
MX_READERS = {
    "fp4": FloatReader(bits=4, block=(1, MX_GROUP), scale_type="e8m0"),
    "fp6_e3m2": FloatReader(bits=6, mantissa=2, block=(1, MX_GROUP), scale_type="e8m0"),
    "fp6_e2m3": FloatReader(bits=6, mantissa=3, block=(1, MX_GROUP), scale_type="e8m0"),
}


@dataclass(frozen=True, slots=True)
class Scheme:
    type: str
    is_per_tensor: bool
    is_symmetric: bool


class Quark(FormatMethod):
    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(setup)
        config = QuantConfig(setup.config, METHOD)
        self.excluded = config.names("exclude")
        of_types = config.part("layer_type_quant_config")
        if of_types is not None and of_types.values:
            raise config.error(
                "layer_type_quant_config",
                of_types.values,
                "does not support schemes of layer types",
            )
        layers = config.part("layer_quant_config")
        default = config.part("global_quant_config")
        by_name = {name: layers.part(name) for name in layers.values} if layers is not None else {}
        if default is None:
            raise config.error("global_quant_config", None, "needs an object")
        each = [default, *(part for part in by_name.values() if part is not None)]
        self.layers = [(name, _scheme(part)) for name, part in by_name.items() if part is not None]
        self.default = _scheme(default)
        if any(part.values.get("input_tensors") for part in each):
            config.say_activations_are_not_quantized()

    def reader(self, module: str, layer: AnyLayer) -> Reader | None:
        if isinstance(layer, EmbeddingLayer) or matches(module, self.excluded):
            return None
        scheme = next(
            (scheme for name, scheme in self.layers if matches(module, [name])), self.default
        )
        if scheme is None:
            return None
        if scheme.type == "int8":
            return Int8Reader(scheme)
        if scheme.type == "fp8_e4m3":
            return FloatReader()
        check_whole_groups(module, columns_of(layer), MX_GROUP, METHOD)
        return MX_READERS[scheme.type]


def _scheme(config: QuantConfig) -> Scheme | None:
    """Return how the weights are stored, None if they are plain."""
    if isinstance(config.values.get("weight"), list):
        raise config.error(
            "weight", config.values["weight"], "does not support weights that were quantized twice"
        )
    weight = config.part("weight")
    if weight is None:
        return None
    kind = weight.one_of("dtype", tuple(SCHEMES))
    arranged = weight.one_of("qscheme", SCHEMES[kind])
    if kind in MX_READERS:
        weight.one_of("group_size", (MX_GROUP,))
        weight.one_of("scale_format", ("e8m0",), "e8m0")
    return Scheme(
        kind, arranged == "per_tensor", weight.flag("symmetric", True) if kind == "int8" else True
    )


class Int8Reader:
    """See the module."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        module = module_of(part)
        rows = part.rows[1] - part.rows[0]
        names = (
            ["weight_scale"] if self.scheme.is_symmetric else ["weight_scale", "weight_zero_point"]
        )
        shapes: list[tuple[int, ...]] = (
            [(1,), ()] if self.scheme.is_per_tensor else [(rows,), (rows, 1)]
        )
        return [
            WantedWeight(part.name, (rows, columns)),
            *(stored_as(available, f"{module}.{name}", *shapes) for name in names),
        ]

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        return block_form(columns, columns)

    def read(self, part: Part, columns: int, pieces: Pieces) -> Blocks | Tensor:
        module = module_of(part)
        zero = None if self.scheme.is_symmetric else f"{module}.weight_zero_point"
        return signed_rows(pieces, part.name, f"{module}.weight_scale", zero, 8, columns)

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        return Grid()

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return [READING, self.scheme.is_per_tensor, self.scheme.is_symmetric]
