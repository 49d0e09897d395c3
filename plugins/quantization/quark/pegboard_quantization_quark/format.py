"""AMD Quark: 8-bit integers or floats with a scale per tensor or row, MXFP4 and MXFP6.

    int8       weight int8 [out, in]              weight_scale [out] or [1]    weight_zero_point
    int8 [out] or [1] fp8_e4m3   weight float8 [out, in]            weight_scale [out] or [1]
    fp4        weight uint8 [out, in / 2]         weight_scale uint8 (exponents of two) [out, in /
    32] fp6_e3m2, fp6_e2m3   weight uint8 [out, in · 3 / 4]   weight_scale as for fp4

A module has the config of the first pattern of `layer_quant_config` that matches its path, and else
`global_quant_config`. Modules in `exclude` are plain. Activations (`input_tensors`) in int8
or fp8_e4m3 have the scale input_scale [1], and perhaps input_zero_point [1], or, if they are
dynamic, a scale per token (per_channel) or per step (per_tensor).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pegboard.interfaces.quantization import EmbeddingLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import TensorEntry, WantedWeight
from pegboard.ops.blocks import Blocks
from pegboard_weights.asked_rounding import AskedRounding, choose_rounding
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
TYPES = {"int8": "int8", "fp8_e4m3": "float8_e4m3fn"}
"""Types of activations → what they are rounded to."""
ROUNDED: Mapping[str, Form] = {"int8": "block_weight", "fp8_e4m3": "code_weight"}
"""Types of weights that are multiplied with activations of the same type → their form."""
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
    inputs: AskedRounding | None = None


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
        schemes = [self.default, *(scheme for _, scheme in self.layers)]
        if any(part.values.get("input_tensors") and _inputs(part) is None for part in each):
            config.say_activations_are_not_quantized()
        self.roundings = {
            kind: choose_rounding(
                setup, METHOD, form, [each.inputs for each in schemes if each and each.type == kind]
            )
            for kind, form in ROUNDED.items()
        }

    def reader(self, module: str, layer: AnyLayer) -> Reader | None:
        if isinstance(layer, EmbeddingLayer) or matches(module, self.excluded):
            return None
        scheme = self._scheme(module)
        if scheme is None:
            return None
        if scheme.type == "int8":
            return Int8Reader(scheme)
        if scheme.type == "fp8_e4m3":
            return FloatReader()
        check_whole_groups(module, columns_of(layer), MX_GROUP, METHOD)
        return MX_READERS[scheme.type]

    def rounding(self, module: str, layer: AnyLayer) -> AskedRounding | None:
        scheme = self._scheme(module)
        if scheme is None or scheme.inputs not in self.roundings.get(scheme.type, ()):
            return None
        return scheme.inputs

    def _scheme(self, module: str) -> Scheme | None:
        return next(
            (scheme for name, scheme in self.layers if matches(module, [name])), self.default
        )


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
        kind,
        arranged == "per_tensor",
        weight.flag("symmetric", True) if kind == "int8" else True,
        _inputs(config),
    )


def _inputs(config: QuantConfig) -> AskedRounding | None:
    """Return how the activations of a scheme are rounded. None = they are not, or to something that
    is not computed: types other than the weights', groups, floats with zero points."""
    inputs = config.values.get("input_tensors")
    weight = config.values.get("weight")
    if not isinstance(inputs, Mapping) or not isinstance(weight, Mapping):
        return None
    kind = TYPES.get(str(inputs.get("dtype")))
    arranged = inputs.get("qscheme")
    is_symmetric = kind != "int8" or inputs.get("symmetric") is not False
    if kind is None or inputs["dtype"] != weight.get("dtype"):
        return None
    if inputs.get("is_dynamic") is True:
        is_known = arranged in ("per_tensor", "per_channel")
        is_shared = arranged == "per_tensor"
        asked = AskedRounding(kind, is_symmetric=is_symmetric, is_shared=is_shared)
        return asked if is_known else None
    asked = AskedRounding(kind, is_static=True, is_symmetric=is_symmetric)
    return asked if arranged == "per_tensor" else None


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
