"""torchao checkpoints in safetensors: tensor subclasses are stored as plain tensors,
`linear._weight_qdata` and so on.

    Int8Tensor, IntxUnpackedToInt8Tensor   qdata int8 [out, in]        scale, zero_point [out / a,
    in / b] Int4Tensor                             qdata int8 [out, in / 2]    scale, zero_point [in
    / b, out] Float8Tensor                           qdata float8 [out, in]      scale [out / a, in
    / b] each of them, optionally               act_pre_scale [in] or [1, in], which multiplies the
    columns of the activations

W = (code − zero_point) · scale. Int4Tensor: W = code · scale + zero_point, with two signed codes
per byte, the first in the low half. The size of a block, a × b, follows from the shapes. Modules
without qdata are plain. How activations are rounded is in the config: see `activations`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import Part, QuantizationSetup
from pegboard.interfaces.weight_loader import TensorEntry, WantedWeight
from pegboard.ops.blocks import Blocks
from pegboard.ops.float_codes import FloatCodes
from pegboard_quantization_torchao.activations import (
    asked_by,
    config_of,
    configs_by_module,
    is_dynamic,
)
from pegboard_weights.asked_rounding import AskedRounding, choose_rounding
from pegboard_weights.composed import ColumnScales, Transform
from pegboard_weights.config import QuantConfig, matches
from pegboard_weights.cuts import Grid
from pegboard_weights.grouped import block_form, grouped_rows
from pegboard_weights.small_floats import FLOAT8, float8_rows, nibbles
from pegboard_weights.stored_weight import (
    TRANSFORMED,
    AnyLayer,
    Form,
    FormatMethod,
    Pieces,
    PlainReader,
    Reader,
    code_form,
    floats,
    in_half,
    module_of,
    stored_as,
    tensor_of,
)

READING = "torchao 1"
"""Part of the keys of the repack cache. Change it whenever the same tensors are read as other
values."""


class TorchAO(FormatMethod):
    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(setup)
        config = QuantConfig(setup.config, "torchao")
        self.plain = config.names("modules_to_not_convert")
        self.configs = configs_by_module(setup.config.get("quant_type"))
        by_form: dict[Form, list[AskedRounding]] = {}
        for each in self.configs.values():
            asked = asked_by(each)
            if asked is not None:
                by_form.setdefault(asked[0], []).append(asked[1])
            elif is_dynamic(each):
                config.say_activations_are_not_quantized()
        self.roundings = {
            form: choose_rounding(setup, "torchao", form, each) for form, each in by_form.items()
        }

    def reader(self, module: str, layer: AnyLayer) -> Reader | None:
        return None if matches(module, self.plain) else TorchAOReader()

    def rounding(self, module: str, layer: AnyLayer) -> AskedRounding | None:
        asked = asked_by(config_of(module, self.configs))
        return asked[1] if asked is not None and asked[1] in self.roundings[asked[0]] else None


class TorchAOReader(PlainReader):
    bits = 0
    """Bits of the codes of an int8 tensor. Known after the first `read`."""

    def _name(self, part: Part, data: str) -> str:
        return f"{module_of(part)}._weight_{data}"

    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        rows = part.rows[1] - part.rows[0]
        qdata = available.get(self._name(part, "qdata"))
        if qdata is None:
            return super().tensors(part, columns, available)
        is_int4 = (
            qdata.shape == (rows, columns // 2) and self._name(part, "zero_point") in available
        )
        if qdata.shape != (rows, columns) and not is_int4:
            raise ModelError(
                f"tensor {qdata.name} has the shape {qdata.shape} for a weight of "
                f"{(rows, columns)}. Plain layouts are supported, and not those of single kernels "
                "(tiled, preshuffled, opaque)"
            )
        scale = self._name(part, "scale")
        zero = self._name(part, "zero_point")
        stored = [
            WantedWeight(name, available[name].shape) for name in (scale, zero) if name in available
        ]
        missing = [] if scale in available else [WantedWeight(scale)]
        pre = self._name(part, "act_pre_scale")
        before = [stored_as(available, pre, (columns,), (1, columns))] if pre in available else []
        return [WantedWeight(qdata.name, qdata.shape), *stored, *missing, *before]

    def transform(self, part: Part, columns: int, pieces: Pieces) -> Transform | None:
        name = self._name(part, "act_pre_scale")
        return (
            ColumnScales(floats(pieces, name).float().reshape(columns)) if name in pieces else None
        )

    def _is_plain(self, part: Part, pieces: Pieces) -> bool:
        return self._name(part, "qdata") not in pieces

    def _block(self, part: Part, pieces: Pieces, shape: tuple[int, int]) -> tuple[int, int]:
        """Return rows and columns per scale."""
        name = self._name(part, "scale")
        stored = tuple(pieces[name].shape)
        counts = {0: (1, 1), 1: (*stored, 1)}.get(len(stored), stored)
        if len(counts) != 2 or 0 in counts or shape[0] % counts[0] or shape[1] % counts[1]:
            raise ModelError(
                f"tensor {name} has the shape {stored}, which does not divide a weight of {shape} "
                "into blocks"
            )
        return shape[0] // counts[0], shape[1] // counts[1]

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        if self._is_plain(part, pieces):
            return "float_weight"
        rows = part.rows[1] - part.rows[0]
        qdata = pieces[self._name(part, "qdata")]
        if tuple(qdata.shape) != (rows, columns):
            return block_form(columns, self._group_of_int4(part, columns, pieces))
        width = self._block(part, pieces, (rows, columns))[1]
        return code_form(columns, width) if "float8" in qdata.stored else block_form(columns, width)

    def read(self, part: Part, columns: int, pieces: Pieces) -> Blocks | FloatCodes | Tensor:
        if self._is_plain(part, pieces):
            return super().read(part, columns, pieces)
        rows = part.rows[1] - part.rows[0]
        name = self._name(part, "qdata")
        qdata = tensor_of(pieces, name, torch.int8, *FLOAT8)
        if qdata.shape != (rows, columns):
            return self._int4(part, columns, pieces)
        block = self._block(part, pieces, (rows, columns))
        scale = floats(pieces, self._name(part, "scale")).reshape(
            rows // block[0], columns // block[1]
        )
        if qdata.dtype in FLOAT8:
            return float8_rows(pieces, name, scale, block)
        codes = self._unsigned(name, qdata)
        zero = 1 << (self.bits - 1)
        scale = in_half(scale).repeat_interleave(block[0], 0)
        points = self._name(part, "zero_point")
        if points not in pieces:
            return grouped_rows(codes, self.bits, scale, zero, block[1])
        stored = pieces[points].data
        fits = isinstance(stored, Tensor) and stored.numel() * block[0] == scale.numel()
        if not isinstance(stored, Tensor) or not fits or not bool((stored == stored.round()).all()):
            raise ModelError(
                f"tensor {points} must have one whole number per scale; it has the shape "
                f"{pieces[points].shape}"
            )
        zeros = stored.reshape(rows // block[0], -1).int().repeat_interleave(block[0], 0) + zero
        return grouped_rows(codes, self.bits, scale, zeros, block[1])

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        if self._name(part, "act_pre_scale") in pieces:
            return TRANSFORMED
        if self._is_plain(part, pieces):
            return Grid()
        shape = (part.rows[1] - part.rows[0], columns)
        qdata = pieces[self._name(part, "qdata")]
        if tuple(qdata.shape) != shape:
            return Grid(columns=self._group_of_int4(part, columns, pieces))
        height, width = self._block(part, pieces, shape)
        return Grid(height if "float8" in qdata.stored else 1, width)

    def _unsigned(self, name: str, codes: Tensor) -> Tensor:
        """Return codes of 4 bits if all of them fit, else of 8. A reload uses as many bits as the
        first load."""
        fits = int(codes.min()) >= -8 and int(codes.max()) <= 7
        self.bits = self.bits or (4 if fits else 8)
        if self.bits == 4 and not fits:
            raise ModelError(
                f"tensor {name} has integers that do not fit into 4 bits, as it had before; load "
                "it in a new engine"
            )
        return (codes + 8).to(torch.uint8) if self.bits == 4 else (codes + -128).view(torch.uint8)

    def _group_of_int4(self, part: Part, columns: int, pieces: Pieces) -> int:
        name = self._name(part, "scale")
        rows = part.rows[1] - part.rows[0]
        shape = tuple(pieces[name].shape)
        if len(shape) != 2 or shape[1] != rows or not shape[0] or columns % shape[0]:
            raise ModelError(
                f"tensor {name} has the shape {shape}; a weight of {(rows, columns)} needs "
                f"(groups, {rows})"
            )
        return columns // shape[0]

    def _int4(self, part: Part, columns: int, pieces: Pieces) -> Blocks | Tensor:
        size = self._group_of_int4(part, columns, pieces)
        codes = (
            nibbles(tensor_of(pieces, self._name(part, "qdata"), torch.int8).view(torch.uint8)) ^ 8
        )
        scale, offset = (
            in_half(floats(pieces, self._name(part, data)).T) for data in ("scale", "zero_point")
        )
        if scale.dtype != offset.dtype:
            scale = scale.float()
            offset = offset.float()
        if scale.shape != offset.shape:
            raise ModelError(
                f"tensor {self._name(part, 'zero_point')} needs the shape of the scales, "
                f"{tuple(scale.T.shape)}"
            )
        return grouped_rows(codes, 4, scale, 8, size, minimum=offset.contiguous())

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return [READING, self._is_plain(part, pieces)]
