"""Quantization method `gguf`: weights stay in the blocks in which they are stored; weights without a block form are dequantized
at load.

Pieces are views of the mapped file. It is decided per weight, whatever mix of GGUF types its parts are stored in. If an earlier
start left the packed form in the repack cache, the file is not read at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import Part, QuantizationSetup
from pegboard.ops.blocks import Blocks
from pegboard_pack_gguf.decode import decode, is_decodable
from pegboard_pack_gguf.dequantize import dequantize_into
from pegboard_pack_gguf.ggml_types import BY_STORED
from pegboard_pack_gguf.options import GGUFOptions
from pegboard_weights.stored_weight import AnyLayer, Form, FormatMethod, Pieces, PlainReader

if TYPE_CHECKING:
    from torch import Tensor

DECODING = "gguf 1"
"""Part of the keys of the repack cache. Change it whenever the same file decodes to different values."""


class GGUFQuantization(FormatMethod):
    def __init__(self, options: GGUFOptions, setup: QuantizationSetup) -> None:
        super().__init__(setup)
        self.options, self._reader = options, GGUFReader(is_native=options.compute == "native")

    def reader(self, module: str, layer: AnyLayer) -> GGUFReader:
        return self._reader

    def kv_cache(self, layer: object) -> str | None:
        """Half precision, which is usual in programs that compute with these blocks. Its rounding error is far smaller than
        theirs."""
        is_float32 = self.setup.dtype == "float32"
        return "float16" if self.options.compute == "native" and is_float32 else None


class GGUFReader(PlainReader):
    """is_native: blocks stay blocks."""

    def __init__(self, is_native: bool) -> None:
        self.is_native = is_native

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        return "block_weight" if self.is_native and is_decodable(pieces[part.name].stored) else "float_weight"

    def read(self, part: Part, columns: int, pieces: Pieces) -> Blocks | Tensor:
        piece = pieces[part.name]
        if isinstance(piece.data, torch.Tensor):
            return piece.data
        if piece.stored not in BY_STORED:
            raise ModelError(f"{piece.name!r} is stored as {piece.stored!r}, which is not a GGUF type")
        if self.form(part, columns, pieces) == "block_weight":
            return decode(piece.data, piece.stored, piece.shape)
        rows = torch.empty(tuple(piece.shape), dtype=torch.float32)
        dequantize_into(piece.data, piece.stored, rows)
        return rows

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return [DECODING, pieces[part.name].stored]
