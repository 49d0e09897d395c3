"""Checkpoints of NVIDIA's Model Optimizer (modelopt): float8, and FP4 with two levels of scales
(NVFP4).

The config is `quantization_config` of config.json, or hf_quant_config.json, which has its values in
an object "quantization". A linear layer has these tensors:

    FP8, FP8_PER_CHANNEL_PER_TOKEN   weight float8_e4m3fn [out, in]   weight_scale [], [out]
    FP8_PB_WO                        weight float8_e4m3fn [out, in]   weight_scale [out / 128, in /
    128] (or [… , 1, …, 1]) NVFP4, W4A16_NVFP4               weight uint8 [out, in / 2]
    weight_scale float8_e4m3fn [out, in / 16], weight_scale_2 [] NVFP4_AWQ
    the same, and pre_quant_scale [in] W4A16_AWQ, W4A8_AWQ              weight uint8 [out / 2, in]
    weight_scale [out, in / group], pre_quant_scale [in] W4A8_NVFP4_FP8                   the same
    as NVFP4, with a scale per 32 columns W4A8_MXFP4_FP8                   weight uint8 [out, in /
    2]       weight_scale uint8 [out, in / 32], exponents MXFP8                            weight
    float8_e4m3fn [out, in]   weight_scale uint8 [out, in / 32], exponents

W = weight · (weight_scale · weight_scale_2). pre_quant_scale multiplies the columns of the
activations; without it, the norm before the layer has it. W4A16_AWQ and W4A8_AWQ have two signed
codes of 4 bits in a byte, the lower half for the even row. weight_scale_2 of W4A8_AWQ is not read:
it is for rounding the weights to float8 when they are multiplied, which is not done.
MIXED_PRECISION names the algorithm of each module in `quantized_layers`. Activations of FP8 are to
be rounded with `input_scale` [], those of FP8_PER_CHANNEL_PER_TOKEN per token, and those of
FP8_PB_WO per token and 128 columns. Other input scales are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pegboard.interfaces.quantization import EmbeddingLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import TensorEntry, WantedWeight
from pegboard.ops.blocks import Blocks
from pegboard.ops.float_codes import FloatCodes
from pegboard_weights.asked_rounding import AskedRounding, choose_rounding
from pegboard_weights.composed import Transform
from pegboard_weights.config import QuantConfig, matches
from pegboard_weights.cuts import Grid
from pegboard_weights.grouped import block_form, check_whole_groups, grouped_rows
from pegboard_weights.small_floats import FloatReader
from pegboard_weights.stored_weight import (
    AnyLayer,
    Form,
    FormatMethod,
    Pieces,
    PlainReader,
    Reader,
    module_of,
    scales_of,
    tensor_of,
)
from pegboard_weights.transformed import TransformedReader

NAME = "ModelOpt"
READING = "modelopt int4 1"
"""Part of the keys of the repack cache. Change it whenever the same tensors are read as other
values."""

Scheme = tuple[Reader, AskedRounding | None]
NVFP4 = FloatReader(bits=4, block=(1, 16), factor="weight_scale_2", scale_type="e4m3")
MXFP4 = FloatReader(bits=4, block=(1, 32), scale_type="e8m0")
INTEGERS = ("W4A16_AWQ", "W4A8_AWQ")
READERS: Mapping[str, FloatReader] = {
    "FP8": FloatReader(),
    "FP8_PER_CHANNEL_PER_TOKEN": FloatReader(),
    "FP8_PB_WO": FloatReader(block=(128, 128)),
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "NVFP4_AWQ": NVFP4,
    "W4A8_NVFP4_FP8": FloatReader(
        bits=4, block=(1, 32), factor="weight_scale_2", scale_type="e4m3"
    ),
    "MXFP4": MXFP4,
    "W4A8_MXFP4_FP8": MXFP4,
    "MXFP8": FloatReader(block=(1, 32), scale_type="e8m0"),
}
MIXED = "MIXED_PRECISION"
FLOAT8 = "float8_e4m3fn"
ROUNDED = {
    "FP8": AskedRounding(FLOAT8, is_static=True),
    "FP8_PER_CHANNEL_PER_TOKEN": AskedRounding(FLOAT8),
    "FP8_PB_WO": AskedRounding(FLOAT8, 128),
}
"""How activations are rounded. ModelOpt's own kernels do not round for FP8_PB_WO, vLLM does."""


class ModelOpt(FormatMethod):
    """Embeddings are plain, and so is every module without scales."""

    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(setup)
        whole = QuantConfig(setup.config, NAME)
        config = whole.part("quantization") or whole
        self.excluded = (*config.names("exclude_modules"), *config.names("ignore"))
        self.by_module: dict[str, Scheme] = {}
        self.default: Scheme | None = None
        if _upper(config).one_of("quant_algo", (*READERS, *INTEGERS, MIXED)) == MIXED:
            layers = config.part("quantized_layers") or QuantConfig({}, NAME)
            for module in layers.values:
                values = layers.part(module) or QuantConfig({}, NAME)
                self.by_module[module] = _scheme(values)
        else:
            self.default = _scheme(config)
        schemes = [self.default, *self.by_module.values()]
        asked = [scheme[1] for scheme in schemes if scheme is not None]
        self.roundings = choose_rounding(setup, NAME, "code_weight", asked)
        if not all(asked):
            config.say_activations_are_not_quantized()
        self.kv_dtype = _kv_dtype(config)

    def reader(self, module: str, layer: AnyLayer) -> Reader | None:
        if isinstance(layer, EmbeddingLayer) or matches(module, self.excluded):
            return None
        scheme = self.by_module.get(module, self.default)
        return None if scheme is None else scheme[0]

    def rounding(self, module: str, layer: AnyLayer) -> AskedRounding | None:
        scheme = self.by_module.get(module, self.default)
        return scheme[1] if scheme is not None and scheme[1] in self.roundings else None


def _kv_dtype(config: QuantConfig) -> str | None:
    """Return the type of the KV cache, None if the config wants none that is supported."""
    algorithm = config.values.get("kv_cache_quant_algo")
    scheme = config.values.get("kv_cache_scheme")
    is_fp8 = isinstance(scheme, Mapping) and (scheme.get("type"), scheme.get("num_bits")) == (
        "float",
        8,
    )
    return "float8_e4m3fn" if is_fp8 or algorithm == "FP8" else None


def _upper(config: QuantConfig) -> QuantConfig:
    """Return the config with its algorithm in capital letters, as some versions write it."""
    algorithm = config.values.get("quant_algo")
    upper = algorithm.upper() if isinstance(algorithm, str) else algorithm
    return QuantConfig({**config.values, "quant_algo": upper}, config.method, config.place)


def _scheme(config: QuantConfig) -> Scheme:
    """Return the reader of a config's algorithm, and how activations are rounded."""
    return _reader(config), ROUNDED.get(_upper(config).values["quant_algo"])


def _reader(config: QuantConfig) -> Reader:
    """Return the reader of a config's algorithm. Raises ModelError if its groups have another size
    than the format's."""
    algorithm = _upper(config).one_of("quant_algo", (*READERS, *INTEGERS))
    if algorithm in INTEGERS:
        config.one_of("has_zero_point", (False,), False)
        return PreScaled(Int4Reader(config.size("group_size", 128)), "pre_quant_scale")
    reader = READERS[algorithm]
    if reader.block is not None:
        config.one_of("group_size", (reader.block[1],), reader.block[1])
    return PreScaled(reader, "pre_quant_scale") if algorithm == "NVFP4_AWQ" else reader


class PreScaled(TransformedReader):
    """The activations of modules without pre_quant_scale are not scaled. Of these, modules without
    weight_scale are plain."""

    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        has_scale = f"{module_of(part)}.{self.ending}" in available
        return (super() if has_scale else self.weight).tensors(part, columns, available)

    def transform(self, part: Part, columns: int, pieces: Pieces) -> Transform | None:
        name = f"{module_of(part)}.{self.ending}"
        return super().transform(part, columns, pieces) if name in pieces else None

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        is_scaled = f"{module_of(part)}.{self.ending}" in pieces
        return (super() if is_scaled else self.weight).grid(part, columns, pieces)


class Int4Reader(PlainReader):
    """Modules without weight_scale are plain."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    def _group(self, columns: int) -> int:
        return columns if self.group_size == -1 else self.group_size

    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        rows = part.rows[1] - part.rows[0]
        scale = f"{module_of(part)}.weight_scale"
        size = self._group(columns)
        if scale not in available:
            return super().tensors(part, columns, available)
        check_whole_groups(module_of(part), columns, size, NAME)
        return [
            WantedWeight(part.name, (rows // 2, columns)),
            WantedWeight(scale, (rows, columns // size)),
        ]

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        is_plain = f"{module_of(part)}.weight_scale" not in pieces
        return "float_weight" if is_plain else block_form(columns, self._group(columns))

    def read(self, part: Part, columns: int, pieces: Pieces) -> Blocks | FloatCodes | Tensor:
        scale = f"{module_of(part)}.weight_scale"
        if scale not in pieces:
            return super().read(part, columns, pieces)
        pairs = tensor_of(pieces, part.name, torch.uint8)
        codes = torch.stack((pairs & 15, pairs >> 4), 1).view(-1, columns) ^ 8
        return grouped_rows(codes, 4, scales_of(pieces, scale), 8, self._group(columns))

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        return Grid(columns=self._group(columns))

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return [READING, self.group_size]
