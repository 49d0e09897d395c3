"""The methods that quantize a plain checkpoint while it is loaded. Layer by layer, every weight becomes `Blocks`.

Kernels treat these like any other blocks. The native ones quantize activations to 8 bits per block and token. The checkpoint can
have any float type. Norms and biases are not quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, LinearLayer, Part, QuantizationSetup, RepackEntry
from pegboard.interfaces.weight_loader import WeightPiece
from pegboard_quantization_integer.options import RtnOptions
from pegboard_quantization_integer.rounding import BLOCK_SIZE, round_to_blocks

Bound = Callable[[Tensor], Tensor]
Kernels = Mapping[str, Callable[..., Any]]
ROUNDING = "rtn 1"
"""A part of the repack cache's keys. Change it whenever the same values round to different blocks."""
HEAD_BITS = 8
"""Bits of embeddings and output heads, whose errors affect the logits directly."""


class Rtn:
    """Round to nearest. A layer uses the plain method if its columns cannot be divided into whole blocks."""

    def __init__(self, options: RtnOptions, setup: QuantizationSetup) -> None:
        if setup.config:
            raise ConfigError(
                f"the checkpoint is already quantized ({setup.config.get('quant_method')!r}), but this method needs plain "
                "weights. Leave out --quantization to use it as it is"
            )
        self.bits, self.setup = options.bits, setup

    def linear(self, layer: LinearLayer) -> BlockLinear | None:
        if layer.in_features % BLOCK_SIZE:
            return None
        bits = HEAD_BITS if layer.is_head else self.bits
        return BlockLinear(layer.path, (layer.out_features, layer.in_features), layer.parts, bits, self.setup)

    def embedding(self, layer: EmbeddingLayer) -> BlockTable | None:
        if layer.width % BLOCK_SIZE:
            return None
        return BlockTable(layer.path, (layer.num_rows, layer.width), (layer.part,), HEAD_BITS, self.setup)

    def kv_cache(self, layer: object) -> None:
        return None


class Int8(Rtn):
    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(RtnOptions(bits=8), setup)


class Int4(Rtn):
    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(RtnOptions(bits=4), setup)


class BlockLinear:
    """One matrix in blocks with `bits` bits. Pieces are kept until `finish`, which rounds them, unless the cache has the
    result."""

    IS_TABLE = False

    def __init__(self, path: str, shape: tuple[int, int], parts: tuple[Part, ...], bits: int, setup: QuantizationSetup) -> None:
        self.path, self.shape, self.bits, self.setup = path, shape, bits, setup
        self.parts = {part.name: part for part in parts}
        self.pieces: dict[str, WeightPiece] = {}
        self._weight: Any = None

    def declare(self) -> list[str]:
        return []

    def accept(self, piece: WeightPiece) -> None:
        start, stop = self.parts[piece.name].rows
        if not isinstance(piece.data, Tensor) or not piece.data.is_floating_point():
            raise ModelError(f"tensor {piece.name} is stored as {piece.stored}; quantizing at load needs floats")
        if tuple(piece.data.shape) != (stop - start, self.shape[1]):
            raise ModelError(
                f"tensor {piece.name} has shape {tuple(piece.data.shape)}; the model expects {(stop - start, self.shape[1])}"
            )
        self.pieces[piece.name] = piece

    def finish(self) -> None:
        missing = sorted(set(self.parts) - set(self.pieces))
        if missing:
            raise ModelError(f"{self.path}: the checkpoint did not contain {', '.join(missing)}")
        pieces, self.pieces = self.pieces, {}
        if self._weight is None:
            make, setup = self.setup.kernels["block_weight"], self.setup
            arguments = (self.shape, getattr(torch, setup.dtype), setup.device)
            self._weight = make(*arguments, is_table=self.IS_TABLE, cache=self._cache_entry(pieces))
            if self._weight.restore():
                return
        for name, piece in pieces.items():
            blocks = round_to_blocks(piece.data, self.bits)
            if blocks is None:
                raise ModelError(f"tensor {name} has values that are not finite or far too large, so it cannot be quantized")
            self._weight.write(self.parts[name].rows[0], blocks)
        self._weight.finish()

    def _cache_entry(self, pieces: Mapping[str, WeightPiece]) -> RepackEntry | None:
        cache = self.setup.repack_cache
        if cache is None:
            return None
        parts = [[part.name, *part.rows, pieces[part.name].stored] for part in self.parts.values()]
        return cache.entry(self.path, [ROUNDING, self.bits, self.shape, self.IS_TABLE, parts])

    def weight(self) -> Any:
        """Return the weight that the op `block_weight` made. It exists after the first `finish`."""
        assert self._weight is not None, "call finish() before the weight is used"
        return self._weight

    def bind(self, kernels: Kernels) -> Bound:
        return self.weight().bind()

    def dequantize(self) -> Tensor:
        return self.weight().dense()

    def num_bytes(self) -> int:
        return int(self.weight().nbytes)


class BlockTable(BlockLinear):
    """An embedding table. The same matrix may also be the output head."""

    IS_TABLE = True

    def bind(self, kernels: Kernels) -> Bound:
        return self.weight().bind_lookup()

    def bind_head(self, kernels: Kernels) -> Bound:
        return self.weight().bind()
