"""Quantization method `gguf`: weights stay in the blocks in which they are stored; weights without a block form are dequantized
at load.

Pieces are views of the mapped file and are only kept until `finish`. It decides per weight, whatever mix of GGUF types its parts
are stored in, takes the packed form from the repack cache if an earlier start left it there (the file is then not read at all),
and decodes otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import (
    EmbeddingLayer,
    LinearLayer,
    Part,
    QuantizationSetup,
    RepackEntry,
    WeightMethod,
)
from pegboard_pack_gguf.decode import decode, is_decodable
from pegboard_pack_gguf.dequantize import dequantize_into
from pegboard_pack_gguf.ggml_types import BY_STORED
from pegboard_pack_gguf.options import GGUFOptions

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.interfaces.attention import AttentionLayer
    from pegboard.interfaces.weight_loader import WeightPiece

Kernels = Mapping[str, Callable[..., Any]]
DECODING = "gguf 1"
"""Part of the keys of the repack cache. Change it whenever the same file decodes to different values."""


class GGUFQuantization:
    def __init__(self, options: GGUFOptions, setup: QuantizationSetup) -> None:
        self.options, self.setup = options, setup

    def linear(self, layer: LinearLayer) -> WeightMethod:
        return GGUFLinear(layer.path, (layer.out_features, layer.in_features), layer.parts, self)

    def embedding(self, layer: EmbeddingLayer) -> WeightMethod:
        return GGUFEmbedding(layer.path, (layer.num_rows, layer.width), (layer.part,), self)

    def kv_cache(self, layer: "AttentionLayer") -> str | None:
        """Half precision, which is usual in programs that compute with these blocks. Its rounding error is far smaller than
        theirs."""
        is_float32 = self.setup.dtype == "float32"
        return "float16" if self.options.compute == "native" and is_float32 else None

    def holder(self, shape: tuple[int, int], pieces: "list[WeightPiece]", cache: RepackEntry | None, is_table: bool) -> Any:
        """Returns the type that holds a weight stored as these pieces."""
        setup = self.setup
        arguments = (shape, getattr(torch, setup.dtype), torch.device(setup.device))
        if self.options.compute == "native" and all(is_decodable(piece.stored) for piece in pieces):
            return BlockHolder(setup.kernels["block_weight"](*arguments, is_table=is_table, cache=cache))
        return FloatHolder(setup.kernels["float_weight"](*arguments, is_table=is_table))


class GGUFWeight:
    """The life cycle that both layers share. Rows without a part (of a padded vocabulary) stay zero."""

    IS_TABLE = False

    def __init__(self, path: str, shape: tuple[int, int], parts: tuple[Part, ...], method: GGUFQuantization) -> None:
        self.path, self.shape, self.method = path, shape, method
        self.parts = {part.name: part for part in parts}
        self.pieces: dict[str, WeightPiece] = {}
        self.held: BlockHolder | FloatHolder | None = None

    def declare(self) -> list[str]:
        """Returns no scales, because blocks have their own."""
        return []

    def accept(self, piece: "WeightPiece") -> None:
        part = self.parts.get(piece.name)
        if part is None:
            raise ModelError(f"{self.path} has no place for {piece.name!r}; its parts are {', '.join(self.parts)}")
        expected = (part.rows[1] - part.rows[0], self.shape[1])
        if tuple(piece.shape) != expected:
            raise ModelError(f"{piece.name!r} has shape {tuple(piece.shape)}, {self.path} expects {expected}")
        if not isinstance(piece.data, torch.Tensor) and piece.stored not in BY_STORED:
            raise ModelError(f"{piece.name!r} is stored as {piece.stored!r}, which is not a GGUF type")
        self.pieces[piece.name] = piece

    def finish(self) -> None:
        """The next `accept` starts a reload. The bound callables see the new weights when it is finished."""
        missing = sorted(set(self.parts) - set(self.pieces))
        if missing:
            raise ModelError(f"{self.path}: the checkpoint did not contain {', '.join(missing)}")
        pieces, self.pieces = [self.pieces[name] for name in self.parts], {}
        if self.held is None:
            self.held = self.method.holder(self.shape, pieces, self._cache_entry(pieces), self.IS_TABLE)
            if self.held.restore():
                return
        for piece in pieces:
            self.held.write(self.parts[piece.name].rows, piece)
        self.held.weight.finish()

    def _cache_entry(self, pieces: "list[WeightPiece]") -> RepackEntry | None:
        cache = self.method.setup.repack_cache
        if cache is None:
            return None
        parts = [(self.parts[piece.name], piece.stored) for piece in pieces]
        content = [[part.name, *part.rows, stored] for part, stored in parts]
        return cache.entry(self.path, [DECODING, self.shape, self.IS_TABLE, content])

    def weight(self) -> Any:
        """The op that holds the matrix. It exists after the first `finish`."""
        assert self.held is not None, "call finish() before the weight is used"
        return self.held.weight

    def dequantize(self) -> "Tensor":
        return self.weight().dense().float()

    def num_bytes(self) -> int:
        return int(self.weight().nbytes)


class GGUFLinear(GGUFWeight):
    def bind(self, kernels: Kernels) -> "Callable[[Tensor], Tensor]":
        return self.weight().bind()


class GGUFEmbedding(GGUFWeight):
    """The embedding table, which can also be the output head."""

    IS_TABLE = True

    def bind(self, kernels: Kernels) -> "Callable[[Tensor], Tensor]":
        return self.weight().bind_lookup()

    def bind_head(self, kernels: Kernels) -> "Callable[[Tensor], Tensor]":
        return self.weight().bind()


class BlockHolder:
    """weight: made by the op `block_weight`."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def restore(self) -> bool:
        return self.weight.restore()

    def write(self, rows: tuple[int, int], piece: "WeightPiece") -> None:
        if isinstance(piece.data, torch.Tensor) or not is_decodable(piece.stored):
            raise ModelError(f"{piece.name!r} comes as {piece.stored} but was first loaded as blocks; reload it as blocks")
        self.weight.write(rows[0], decode(piece.data, piece.stored, piece.shape))


class FloatHolder:
    """weight: made by the op `float_weight`."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def restore(self) -> bool:
        return False

    def write(self, rows: tuple[int, int], piece: "WeightPiece") -> None:
        target = self.weight.plain()[rows[0] : rows[1]]
        if isinstance(piece.data, torch.Tensor):
            target.copy_(piece.data)
        else:
            dequantize_into(piece.data, piece.stored, target)
