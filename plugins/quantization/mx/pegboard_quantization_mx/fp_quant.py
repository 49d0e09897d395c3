"""FP-Quant checkpoints (Egiazarian et al. 2025): MXFP4 or NVFP4 weights for inputs that are
multiplied by a Hadamard matrix.

    forward_hadamard_matrix [n, n]   for every n columns of the input: x · H
    qweight uint8 [out, in / 2]      scales uint8 (exponents, or e4m3) [out, in / 32] or [out, in /
    16]   weight_global_scale [1] dqweight [out, in]               instead of these, for
    `pseudoquantization`: the same values as floats

W = qweight · scales / weight_global_scale. With `store_master_weights`, the checkpoint has the
plain weights, which are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from pegboard.interfaces.quantization import EmbeddingLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import TensorEntry, WantedWeight
from pegboard_weights.config import QuantConfig, matches
from pegboard_weights.small_floats import FloatReader
from pegboard_weights.stored_weight import (
    AnyLayer,
    FormatMethod,
    Pieces,
    PlainReader,
    Reader,
    floats,
    module_of,
)
from pegboard_weights.transformed import TransformedReader

METHOD = "FP-Quant"


def _stored(columns: int, scale_type: str) -> FloatReader:
    return FloatReader(
        bits=4,
        block=(1, columns),
        weight=("qweight",),
        scale=("scales",),
        factor="weight_global_scale",
        is_divisor=True,
        scale_type="e8m0" if scale_type == "e8m0" else "e4m3",
    )


STORED = {"mxfp4": _stored(32, "e8m0"), "nvfp4": _stored(16, "e4m3")}


class FPQuant(FormatMethod):
    """Embeddings, the output head and the modules that the config names are plain."""

    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(setup)
        config = QuantConfig(setup.config, METHOD)
        weight: Reader = STORED[config.one_of("forward_dtype", tuple(STORED), "mxfp4")]
        if config.flag("pseudoquantization"):
            weight = PseudoQuantized()
        self.stored = TransformedReader(
            weight, "forward_hadamard_matrix", config.size("hadamard_group_size", 32)
        )
        self.is_plain = config.flag("store_master_weights")
        self.excluded = config.names("modules_to_not_convert")
        config.say_activations_are_not_quantized()

    def reader(self, module: str, layer: AnyLayer) -> Reader | None:
        is_plain = (
            self.is_plain
            or isinstance(layer, EmbeddingLayer)
            or layer.is_head
            or matches(module, self.excluded)
        )
        return None if is_plain else self.stored


class PseudoQuantized(PlainReader):
    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        return [WantedWeight(f"{module_of(part)}.dqweight", (part.rows[1] - part.rows[0], columns))]

    def read(self, part: Part, columns: int, pieces: Pieces) -> Tensor:
        return floats(pieces, f"{module_of(part)}.dqweight")

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return ["dqweight"]
