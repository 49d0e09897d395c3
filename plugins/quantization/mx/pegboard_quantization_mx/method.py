"""Checkpoints in MXFP4: FP4 with a power of two per 32 columns ("OCP Microscaling Formats (MX)
Specification", 2023).

    weight_blocks uint8 [out, in / 32, 16]   weight_scales uint8 [out, in / 32]      as gpt-oss
    names and shapes them weight uint8 [out, in / 2]               weight_scale uint8 [out, in / 32]

W[r, c] = code · 2^(scale[r, c // 32] − 127). The low half of a byte is the even column.
"""

from __future__ import annotations

from pegboard.interfaces.quantization import EmbeddingLayer, QuantizationSetup
from pegboard_weights.config import QuantConfig, matches
from pegboard_weights.small_floats import FloatReader
from pegboard_weights.stored_weight import AnyLayer, FormatMethod, PlainReader, Reader

STORED = FloatReader(
    bits=4,
    block=(1, 32),
    weight=("weight_blocks", "weight"),
    scale=("weight_scales", "weight_scale"),
    scale_type="e8m0",
)


class MXFP4(FormatMethod):
    """Embeddings, the output head and the modules that the config names are plain."""

    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(setup)
        self.excluded = QuantConfig(setup.config, "MXFP4").names("modules_to_not_convert")

    def reader(self, module: str, layer: AnyLayer) -> Reader | None:
        if isinstance(layer, EmbeddingLayer) or layer.is_head or matches(module, self.excluded):
            return PlainReader()
        return STORED
