"""bitsandbytes: int8 with a scale per row (Dettmers et al. 2022), and nf4 or fp4 with a scale per
block (Dettmers et al. 2023).

    8 bits   weight int8 [out, in]            weight.SCB → SCB float32 [out]
    4 bits   weight uint8, out · in / 2       weight.absmax, weight.quant_map [16],
    weight.quant_state.bitsandbytes__nf4 (JSON)

8 bits: W[r, c] = weight[r, c] · SCB[r] / 127. 4 bits: the elements of W, row after row, are two
codes per byte, the first in the high half. An element is quant_map[code] · absmax[block], with
`blocksize` consecutive elements per block. If absmax is uint8, it is quantized itself: absmax =
nested_quant_map[code] · nested_absmax[nested block] + nested_offset.

Which modules are quantized is seen from what is stored. A plain checkpoint is quantized to nf4
while it is loaded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import TensorEntry, WantedWeight, WeightPiece
from pegboard.ops.blocks import Blocks
from pegboard.ops.float_codes import FloatCodes, ScaleCodes
from pegboard_weights.config import QuantConfig, matches
from pegboard_weights.cuts import Grid
from pegboard_weights.grouped import block_form, grouped_rows, scales_of_rows
from pegboard_weights.small_floats import packed_if_possible
from pegboard_weights.stored_weight import (
    AnyLayer,
    Form,
    FormatMethod,
    Pieces,
    PlainReader,
    Reader,
    code_form,
    floats,
    module_of,
    tensor_of,
)

STATE = "quant_state.bitsandbytes__"
"""How the name of the tensor goes on, after the weight's, whose JSON says how that is stored."""
READING = "bitsandbytes 2"
"""Part of the keys of the repack cache. Change it whenever the same tensors are read as other
values."""

ONLINE_BLOCK = 64
CHUNK_ELEMENTS = 1 << 22
"""Number of elements that are rounded at a time, which limits the temporary memory."""

NF4 = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
    ]
    + [
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
    ]
    + [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)
"""What the 16 codes of nf4 stand for."""


class BitsAndBytes(FormatMethod):
    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(setup)
        config = QuantConfig(setup.config, "bitsandbytes")
        self.is_online = not setup.config
        self.skipped = config.names("llm_int8_skip_modules")
        bits = {4: config.flag("load_in_4bit"), 8: config.flag("load_in_8bit")}
        if not self.is_online and sum(bits.values()) != 1:
            raise config.error(
                "load_in_4bit", bits[4], "needs one of load_in_4bit and load_in_8bit"
            )
        self.bits = 8 if bits[8] else 4

    def reader(self, module: str, layer: AnyLayer) -> Reader | None:
        if (
            isinstance(layer, EmbeddingLayer)
            or matches(module, self.skipped)
            or (self.is_online and layer.is_head)
        ):
            return None
        if self.is_online:
            return OnlineReader()
        return FourBitReader() if self.bits == 4 else EightBitReader()


class EightBitReader(PlainReader):
    """A part with SCB is quantized, one without is plain."""

    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        module = module_of(part)
        rows = part.rows[1] - part.rows[0]
        plain = super().tensors(part, columns, available)
        stored = available.get(part.name)
        if stored is not None and stored.stored != "int8":
            return plain
        layout = f"{module}.weight_format"
        optional = [WantedWeight(layout, available[layout].shape)] if layout in available else []
        return [*plain, WantedWeight(f"{module}.SCB", (rows,)), *optional]

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        return (
            block_form(columns, columns) if f"{module_of(part)}.SCB" in pieces else "float_weight"
        )

    def read(self, part: Part, columns: int, pieces: Pieces) -> Blocks | FloatCodes | Tensor:
        module = module_of(part)
        if f"{module}.SCB" not in pieces:
            return super().read(part, columns, pieces)
        layout = f"{module}.weight_format"
        if layout in pieces and bool(tensor_of(pieces, layout, torch.uint8).any()):
            raise ModelError(
                f"tensor {layout} names a layout of GPU kernels; only 0, rows as they are, is "
                "supported"
            )
        codes = (tensor_of(pieces, part.name, torch.int8) + -128).view(torch.uint8)
        scale = tensor_of(pieces, f"{module}.SCB", torch.float32).unsqueeze(1) / 127
        return grouped_rows(codes, 8, scale, 128, columns)

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return [READING, 8, f"{module_of(part)}.SCB" in pieces]


class FourBitReader(PlainReader):
    """A part with absmax is quantized, one without is plain."""

    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        plain = super().tensors(part, columns, available)
        stored = available.get(part.name)
        names = sorted(name for name in available if name.startswith(f"{part.name}."))
        if not names and stored is not None and stored.shape == plain[0].shape:
            return plain
        size = (part.rows[1] - part.rows[0]) * columns // 2
        shape = stored.shape if stored is not None and stored.num_bytes == size else (size, 1)
        needed = [f"{part.name}.absmax", f"{part.name}.quant_map"]
        missing = [WantedWeight(name) for name in needed if name not in available]
        return [
            WantedWeight(part.name, shape),
            *(WantedWeight(name, available[name].shape, is_first=STATE in name) for name in names),
            *missing,
        ]

    def _state(self, part: Part, pieces: Pieces) -> _State | None:
        if f"{part.name}.absmax" not in pieces:
            return None
        name = next(
            (name for name in pieces if name.startswith(f"{part.name}.{STATE}")),
            None,
        )
        if name is None:
            raise ModelError(
                f"the checkpoint has no tensor {part.name}.quant_state.bitsandbytes__nf4 or …__fp4"
            )
        return _State(pieces[name])

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        state = self._state(part, pieces)
        return (
            "float_weight" if state is None else code_form(columns, math.gcd(columns, state.block))
        )

    def read(self, part: Part, columns: int, pieces: Pieces) -> Blocks | FloatCodes | Tensor:
        state = self._state(part, pieces)
        rows = part.rows[1] - part.rows[0]
        if state is None:
            return super().read(part, columns, pieces)
        if state.shape != (rows, columns):
            raise ModelError(
                f"{part.name} was quantized with the shape {state.shape}; this model needs "
                f"{(rows, columns)}"
            )
        stored = pieces[part.name].data
        assert isinstance(stored, Tensor)
        packed = stored.contiguous().view(torch.uint8).flatten()
        codes = torch.stack((packed >> 4, packed & 15), dim=-1).view(rows, columns)
        values = _sized(
            floats(pieces, f"{part.name}.quant_map"), 16, f"{part.name}.quant_map"
        ).float()
        absmax = self._absmax(part, pieces, state, rows * columns)
        if isinstance(absmax, Tensor):
            return _rows(codes, values, absmax, state.block)
        per_row = columns // state.block
        share = _share(columns, state)
        # a second level for every scale would be larger than the scales
        if share == 1:
            return _rows(codes, values, absmax.float().flatten(), state.block)
        outer = absmax.outer.view(rows, per_row)[:, ::share]
        scales = ScaleCodes(absmax.codes.view(rows, per_row), absmax.values, outer, absmax.offset)
        return packed_if_possible(FloatCodes(codes, values, scales, (1, state.block)))

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        state = self._state(part, pieces)
        if state is None:
            return Grid()
        is_nested = pieces[f"{part.name}.absmax"].stored == "uint8"
        return Grid(columns=math.gcd(columns, state.block) * _share(columns, state, is_nested))

    def _absmax(
        self, part: Part, pieces: Pieces, state: _State, num_elements: int
    ) -> Tensor | ScaleCodes:
        """Return the scales of all blocks: float32 [blocks], or codes of one row, with the second
        level for each."""
        name = f"{part.name}.absmax"
        stored = _sized(
            tensor_of(pieces, name, torch.uint8, torch.float32),
            -(-num_elements // state.block),
            name,
        )
        if stored.dtype == torch.float32:
            return stored.flatten()
        for nested in ("nested_absmax", "nested_quant_map"):
            if f"{part.name}.{nested}" not in pieces:
                raise ModelError(
                    f"{name} is quantized, but the checkpoint has no tensor {part.name}.{nested}"
                )
        values = _sized(
            floats(pieces, f"{part.name}.nested_quant_map"), 256, f"{part.name}.nested_quant_map"
        )
        count = -(-stored.numel() // state.nested_block)
        scale = _sized(
            floats(pieces, f"{part.name}.nested_absmax"), count, f"{part.name}.nested_absmax"
        ).flatten()
        outer = scale.repeat_interleave(state.nested_block)[: stored.numel()]
        return ScaleCodes(
            stored.view(1, -1), values.flatten(), outer.view(1, -1), state.nested_offset
        )

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return [READING, 4, f"{part.name}.absmax" in pieces]


class _State:
    """The JSON of a quant_state tensor."""

    def __init__(self, piece: WeightPiece) -> None:
        self.name = piece.name
        try:
            assert isinstance(piece.data, Tensor)
            values = json.loads(bytes(piece.data.to(torch.uint8).flatten().tolist()))
        except ValueError as error:
            raise ModelError(f"tensor {piece.name} is not JSON: {error}") from error
        self.values = values if isinstance(values, dict) else {}
        self.block = self._size("blocksize")
        has_nested = self.values.get("nested_blocksize") is not None
        self.nested_block = self._size("nested_blocksize") if has_nested else 1
        self.nested_offset = self._number("nested_offset") if has_nested else 0.0
        shape = self.values.get("shape")
        self.shape = tuple(shape) if isinstance(shape, list) else ()

    def _size(self, key: str) -> int:
        value: Any = self.values.get(key)
        if type(value) is not int or value <= 0:
            raise ModelError(
                f"tensor {self.name} has {key}={value!r}; bitsandbytes needs a positive number"
            )
        return value

    def _number(self, key: str) -> float:
        value: Any = self.values.get(key)
        if not isinstance(value, int | float):
            raise ModelError(f"tensor {self.name} has {key}={value!r}; bitsandbytes needs a number")
        return float(value)


def _share(columns: int, state: _State, is_nested: bool = True) -> int:
    """Return how many scales of a row share one of the second level."""
    is_whole = is_nested and not columns % state.block
    return math.gcd(columns // state.block, state.nested_block) if is_whole else 1


def _sized(data: Tensor, size: int, name: str) -> Tensor:
    if data.numel() != size:
        raise ModelError(f"tensor {name} has {data.numel()} values; this weight needs {size}")
    return data


def _rows(codes: Tensor, values: Tensor, absmax: Tensor, block: int) -> FloatCodes | Tensor:
    """Return codes [rows, columns] as the table `values` and the scales of blocks of consecutive
    elements."""
    rows, columns = codes.shape
    scale, size = scales_of_rows(absmax, rows, columns, block)
    return packed_if_possible(FloatCodes(codes, values, scale, (1, size)))


class OnlineReader(PlainReader):
    """Rounds floats to nf4."""

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        return code_form(columns, math.gcd(columns, ONLINE_BLOCK))

    def read(self, part: Part, columns: int, pieces: Pieces) -> FloatCodes | Tensor:
        plain = floats(pieces, part.name)
        flat = plain.flatten()
        absmax = torch.empty(-(-flat.numel() // ONLINE_BLOCK))
        codes = torch.empty(flat.numel(), dtype=torch.uint8)
        borders = (NF4[1:] + NF4[:-1]) / 2
        for start in range(0, flat.numel(), CHUNK_ELEMENTS):
            values = flat[start : start + CHUNK_ELEMENTS].to("cpu", torch.float32)
            blocks = functional.pad(values, (0, -values.numel() % ONLINE_BLOCK)).view(
                -1, ONLINE_BLOCK
            )
            most = blocks.abs().amax(1)
            if not most.isfinite().all():
                raise ModelError(
                    f"tensor {part.name} has values that are not finite, so it cannot be quantized"
                )
            scaled = blocks / most.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
            nearest = torch.bucketize(scaled, borders).flatten()[: values.numel()]
            absmax[start // ONLINE_BLOCK : start // ONLINE_BLOCK + len(blocks)] = most
            codes[start : start + values.numel()] = nearest.to(torch.uint8)
        return _rows(codes.view(plain.shape), NF4, absmax, ONLINE_BLOCK)

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        return Grid(columns=math.gcd(columns, ONLINE_BLOCK))

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return [READING, "online", pieces[part.name].stored]
