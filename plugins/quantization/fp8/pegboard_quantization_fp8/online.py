"""Plain weights that are rounded to small floats while they are loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, Part, QuantizationSetup
from pegboard.ops.float_codes import FloatCodes, float8_values, minifloat_values
from pegboard_weights.config import QuantConfig
from pegboard_weights.cuts import Grid
from pegboard_weights.stored_weight import (
    AnyLayer,
    Form,
    FormatMethod,
    Pieces,
    PlainReader,
    code_form,
    floats,
)

ROUNDING = "fp8 1"
"""A part of the repack cache's keys. Change it whenever the same values round to different
codes."""

E4M3 = float8_values(torch.float8_e4m3fn)
CHUNK_ELEMENTS = 1 << 22
"""Number of elements that are rounded at a time, which limits the temporary memory."""


class RowReader(PlainReader):
    """Rounds to the nearest e4m3 code, or to E3M2 if bits is 6, with a scale per row and
    `group_size` columns (all columns if they are not whole groups). The scale brings the largest
    magnitude to the largest code."""

    def __init__(self, bits: int = 8, group_size: int | None = None) -> None:
        self.values = E4M3 if bits == 8 else minifloat_values(3, 2)
        self.bits = bits
        self.group_size = group_size

    def _group(self, columns: int) -> int:
        return columns if self.group_size is None or columns % self.group_size else self.group_size

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        return code_form(columns, self._group(columns))

    def read(self, part: Part, columns: int, pieces: Pieces) -> FloatCodes | Tensor:
        plain = floats(pieces, part.name)
        group = self._group(columns)
        codes = torch.empty(plain.shape, dtype=torch.uint8)
        scale = torch.empty(len(plain), columns // group)
        step = max(1, CHUNK_ELEMENTS // columns)
        for start in range(0, len(plain), step):
            cut = slice(start, start + step)
            groups = plain[cut].to("cpu", torch.float32).reshape(-1, columns // group, group)
            most = groups.abs().amax(2)
            if not most.isfinite().all():
                raise ModelError(
                    f"tensor {part.name} has values that are not finite, so it cannot be quantized"
                )
            scale[cut] = torch.where(most > 0, most / float(self.values.nan_to_num().max()), 1)
            codes[cut] = self._codes(groups / scale[cut].unsqueeze(2)).view(-1, columns)
        weight = FloatCodes(codes, self.values, scale, (1, group))
        return weight if self.form(part, columns, pieces) == "code_weight" else weight.dense()

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        return Grid(columns=self._group(columns))

    def _codes(self, values: Tensor) -> Tensor:
        if self.bits == 8:
            return values.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        half = self.values[: len(self.values) // 2]  # from 0 up
        borders = (half[1:] + half[:-1]) / 2
        codes = torch.bucketize(values.abs(), borders).byte()
        return codes + (values < 0).byte() * len(half)

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return [ROUNDING, self.bits, self.group_size, pieces[part.name].stored]


class DeepSpeedFP(FormatMethod):
    """Checkpoints of plain weights whose config asks for FP8 or FP6 in groups: {"bits": 8 or 6,
    "group_size": 512}."""

    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(setup)
        config = QuantConfig(setup.config, "DeepSpeed FP")
        group_size = config.size("group_size", 512)
        self.rows = RowReader(
            config.one_of("bits", (8, 6), 8), None if group_size == -1 else group_size
        )

    def reader(self, module: str, layer: AnyLayer) -> RowReader | None:
        return None if isinstance(layer, EmbeddingLayer) or layer.is_head else self.rows
