"""Checkpoints of NVIDIA's Model Optimizer (modelopt): float8, and FP4 with two levels of scales (NVFP4).

The config is `quantization_config` of config.json, or hf_quant_config.json, which has its values in an object "quantization". A
linear layer has these tensors:

    FP8, FP8_PER_CHANNEL_PER_TOKEN   weight float8_e4m3fn [out, in]   weight_scale [], [out]
    FP8_PB_WO                        weight float8_e4m3fn [out, in]   weight_scale [out / 128, in / 128] (or [… , 1, …, 1])
    NVFP4, W4A16_NVFP4               weight uint8 [out, in / 2]       weight_scale float8_e4m3fn [out, in / 16], weight_scale_2 []
    NVFP4_AWQ                        the same, and pre_quant_scale [in], which multiplies the columns of the activations
    MXFP8                            weight float8_e4m3fn [out, in]   weight_scale uint8 [out, in / 32], exponents

W = weight · (weight_scale · weight_scale_2). MIXED_PRECISION names the algorithm of each module in `quantized_layers`. Input
scales are not read.
"""

from __future__ import annotations

from collections.abc import Mapping

from pegboard.interfaces.quantization import EmbeddingLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import TensorEntry, WantedWeight
from pegboard_weights.composed import Transform
from pegboard_weights.config import QuantConfig, matches
from pegboard_weights.small_floats import FloatReader
from pegboard_weights.stored_weight import AnyLayer, FormatMethod, Pieces, Reader, module_of
from pegboard_weights.transformed import TransformedReader

NAME = "ModelOpt"
NVFP4 = FloatReader(bits=4, block=(1, 16), factor="weight_scale_2", scale_type="e4m3")
READERS: Mapping[str, FloatReader] = {
    "FP8": FloatReader(),
    "FP8_PER_CHANNEL_PER_TOKEN": FloatReader(),
    "FP8_PB_WO": FloatReader(block=(128, 128)),
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "NVFP4_AWQ": NVFP4,
    "MXFP8": FloatReader(block=(1, 32), scale_type="e8m0"),
}
MIXED = "MIXED_PRECISION"


class ModelOpt(FormatMethod):
    """Embeddings are plain, and so is every module without scales."""

    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(setup)
        whole = QuantConfig(setup.config, NAME)
        config = whole.part("quantization") or whole
        self.excluded = (*config.names("exclude_modules"), *config.names("ignore"))
        self.by_module: dict[str, Reader] = {}
        self.default: Reader | None = None
        if _upper(config).one_of("quant_algo", (*READERS, MIXED)) == MIXED:
            layers = config.part("quantized_layers") or QuantConfig({}, NAME)
            for module in layers.values:
                values = layers.part(module) or QuantConfig({}, NAME)
                self.by_module[module] = _reader(values)
        else:
            self.default = _reader(config)
        config.say_activations_are_not_quantized()
        self.kv_dtype = _kv_dtype(config)

    def reader(self, module: str, layer: AnyLayer) -> Reader | None:
        if isinstance(layer, EmbeddingLayer) or matches(module, self.excluded):
            return None
        return self.by_module.get(module, self.default)


def _kv_dtype(config: QuantConfig) -> str | None:
    """Return the type of the KV cache, None if the config wants none that is supported."""
    algorithm, scheme = config.values.get("kv_cache_quant_algo"), config.values.get("kv_cache_scheme")
    is_fp8 = isinstance(scheme, Mapping) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    return "float8_e4m3fn" if is_fp8 or algorithm == "FP8" else None


def _upper(config: QuantConfig) -> QuantConfig:
    """Return the config with its algorithm in capital letters, as some versions write it."""
    algorithm = config.values.get("quant_algo")
    upper = algorithm.upper() if isinstance(algorithm, str) else algorithm
    return QuantConfig({**config.values, "quant_algo": upper}, config.method, config.place)


def _reader(config: QuantConfig) -> Reader:
    """Return the reader of a config's algorithm. Raises ModelError if its groups have another size than the format's."""
    algorithm = _upper(config).one_of("quant_algo", tuple(READERS))
    reader = READERS[algorithm]
    if reader.block is not None:
        config.one_of("group_size", (reader.block[1],), reader.block[1])
    return PreScaled(reader, "pre_quant_scale") if algorithm == "NVFP4_AWQ" else reader


class PreScaled(TransformedReader):
    """Modules without scales, as the output head, are plain, and then their activations are not scaled either."""

    def tensors(self, part: Part, columns: int, available: Mapping[str, TensorEntry]) -> list[WantedWeight]:
        wanted = self.weight.tensors(part, columns, available)
        return wanted if [each.name for each in wanted] == [part.name] else super().tensors(part, columns, available)

    def transform(self, part: Part, columns: int, pieces: Pieces) -> Transform | None:
        name = f"{module_of(part)}.{self.ending}"
        return super().transform(part, columns, pieces) if name in pieces else None
