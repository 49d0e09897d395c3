"""The methods that quantize a plain checkpoint while it is loaded. Layer by layer, every weight
becomes `Blocks`.

Kernels treat these like any other blocks. The native ones quantize activations to 8 bits per block
and token. The checkpoint can have any float type. Norms and biases are not quantized.
"""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, Part, QuantizationSetup
from pegboard.ops.blocks import Blocks
from pegboard_quantization_integer.options import RtnOptions
from pegboard_quantization_integer.rounding import BLOCK_SIZE, round_to_blocks
from pegboard_weights.cuts import Grid
from pegboard_weights.stored_weight import (
    AnyLayer,
    Form,
    FormatMethod,
    Pieces,
    PlainReader,
    columns_of,
    floats,
)

ROUNDING = "rtn 2"
"""A part of the repack cache's keys. Change it whenever the same values round to different
blocks."""
HEAD_BITS = 8
"""Bits of embeddings and output heads, whose errors affect the logits directly."""


def _refuse_quantized(setup: QuantizationSetup) -> None:
    if setup.config:
        raise ConfigError(
            f"the checkpoint is already quantized ({setup.config.get('quant_method')!r}), but "
            "this method needs plain weights. Leave out --quantization to use it as it is"
        )


class Rtn(FormatMethod):
    """Round to nearest. A layer uses the plain method if its columns cannot be divided into whole
    blocks."""

    def __init__(self, options: RtnOptions, setup: QuantizationSetup) -> None:
        _refuse_quantized(setup)
        super().__init__(setup)
        self.bits = options.bits
        self.group_size = options.group_size

    def reader(self, module: str, layer: AnyLayer) -> RoundingReader | None:
        is_head = isinstance(layer, EmbeddingLayer) or layer.is_head
        bits, group_size = (HEAD_BITS, BLOCK_SIZE) if is_head else (self.bits, self.group_size)
        return None if columns_of(layer) % group_size else RoundingReader(bits, group_size)


class Int8(Rtn):
    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(RtnOptions(bits=8), setup)


class Int4(Rtn):
    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(RtnOptions(bits=4), setup)


class TPUInt8(FormatMethod):
    """8 bits with a scale per row of a linear layer. Embeddings and output heads are plain."""

    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        _refuse_quantized(setup)
        super().__init__(setup)

    def reader(self, module: str, layer: AnyLayer) -> RoundingReader | None:
        columns = columns_of(layer)
        is_plain = isinstance(layer, EmbeddingLayer) or layer.is_head or columns % BLOCK_SIZE
        return None if is_plain else RoundingReader(8, columns)


class ExpertsInt8(FormatMethod):
    """8 bits with a scale per row for the experts of a mixture of experts. All other weights are
    plain."""

    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        _refuse_quantized(setup)
        super().__init__(setup)

    def reader(self, module: str, layer: AnyLayer) -> RoundingReader | None:
        columns = columns_of(layer)
        is_plain = (
            isinstance(layer, EmbeddingLayer) or not layer.num_experts or columns % BLOCK_SIZE
        )
        return None if is_plain else RoundingReader(8, columns)


class RoundingReader(PlainReader):
    """Rounds floats to blocks of `group_size` columns with `bits` bits."""

    def __init__(self, bits: int, group_size: int) -> None:
        self.bits = bits
        self.group_size = group_size

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        return "block_weight"

    def read(self, part: Part, columns: int, pieces: Pieces) -> Blocks:
        blocks = round_to_blocks(floats(pieces, part.name), self.bits, self.group_size)
        if blocks is None:
            raise ModelError(
                f"tensor {part.name} has values that are not finite or far too large, so it "
                "cannot be quantized"
            )
        return blocks

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        return Grid(columns=self.group_size)

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return [ROUNDING, self.bits, self.group_size, pieces[part.name].stored]
