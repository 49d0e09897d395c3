"""GPTQ: integers of 2, 3, 4 or 8 bits with a scale and a zero point per group of columns (Frantar
et al. 2022), as AutoGPTQ and GPTQModel store them.

W[r, c] = scale[r, g] · (code[r, c] − zero[r, g]) with g = g_idx[c]. A linear layer has these
tensors. The codes are a stream of bits in 32-bit words, along the columns for qweight and along the
rows for qzeros:

    qweight [in · bits / 32, out]   qzeros [groups, out · bits / 32]   scales [groups, out]   g_idx
    [in]

Without g_idx, the columns c of group g are those with c // group_size = g. Format v1 stores each
zero point less one; "gptq_v2" stores it as it is. Format "marlin_24" is in the module
`pegboard_weights.marlin_24`, as tensors B_24, B_meta and s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import Cut, EmbeddingLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import Box, TensorEntry, WantedWeight
from pegboard.ops.blocks import Blocks
from pegboard_weights.config import QuantConfig
from pegboard_weights.cuts import Grid
from pegboard_weights.grouped import block_form, column_groups, group_grid, grouped_rows
from pegboard_weights.marlin_24 import Marlin24Reader
from pegboard_weights.packed_integers import unpack
from pegboard_weights.stored_weight import (
    AnyLayer,
    Form,
    FormatMethod,
    Pieces,
    Reader,
    module_of,
    scales_of,
    tensor_of,
    words_of,
)

READING = "gptq 1"
"""Part of the keys of the repack cache. Change it whenever the same tensors are read as other
values."""

BITS = (2, 3, 4, 8)


class GPTQ(FormatMethod):
    """`dynamic` of the config: pattern → values that replace the config's for the modules that the
    pattern matches. A pattern that begins with "-:" leaves these modules unquantized."""

    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(setup)
        config = QuantConfig(setup.config, "GPTQ")
        self.quantizes_head = config.flag("lm_head")
        dynamic = setup.config.get("dynamic") or {}
        if not isinstance(dynamic, Mapping):
            raise ModelError(
                f"the checkpoint's quantization_config has dynamic={dynamic!r}; GPTQ needs an "
                "object"
            )
        self.dynamic = [
            (_pattern(text), text.startswith("-:"), values) for text, values in dynamic.items()
        ]
        self.plain = self._reader({})

    def reader(self, module: str, layer: AnyLayer) -> Reader | None:
        if isinstance(layer, EmbeddingLayer) or (layer.is_head and not self.quantizes_head):
            return None
        for pattern, leaves_out, values in self.dynamic:
            if pattern.match(module):
                return None if leaves_out else self._reader(values)
        return self.plain

    def _reader(self, changes: Mapping[str, Any]) -> Reader:
        config = QuantConfig({**self.setup.config, **changes}, "GPTQ")
        is_marlin = config.values.get("quant_method") == "gptq_marlin_24"
        if config.values.get("checkpoint_format") == "bitblas" or config.values.get(
            "is_bitblas_format"
        ):
            raise ModelError(
                "the checkpoint is stored in BitBLAS' own layout, which depends on the GPU that "
                "it was written for and does not "
                "name it; use the GPTQ checkpoint that it was made from, or save it with the "
                'format "gptq"'
            )
        version = config.one_of(
            "checkpoint_format",
            ("gptq", "gptq_v2", "marlin_24"),
            "marlin_24" if is_marlin else "gptq",
        )
        if version == "marlin_24":
            config.one_of("sym", (True,), True)
            return Marlin24Reader(
                config.one_of("bits", (4, 8)),
                config.size("group_size", 128),
                ("B_24", "B_meta", "s"),
            )
        return GPTQReader(
            config.one_of("bits", BITS),
            config.size("group_size", 128),
            1 if version == "gptq" else 0,
        )


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text.removeprefix("+:").removeprefix("-:"))
    except re.error as error:
        raise ModelError(
            f"the checkpoint's quantization_config has the pattern {text!r} in dynamic: {error}"
        ) from error


class GPTQReader:
    """zero_offset: what is added to the stored zero points."""

    def __init__(self, bits: int, group_size: int, zero_offset: int) -> None:
        self.bits = bits
        self.group_size = group_size
        self.zero_offset = zero_offset

    def _group(self, columns: int) -> int:
        return columns if self.group_size == -1 else self.group_size

    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        rows = part.rows[1] - part.rows[0]
        module = module_of(part)
        groups = -(-columns // self._group(columns))
        wanted = [
            WantedWeight(f"{module}.qweight", (columns * self.bits // 32, rows)),
            WantedWeight(f"{module}.qzeros", (groups, rows * self.bits // 32)),
            WantedWeight(f"{module}.scales", (groups, rows)),
        ]
        order = f"{module}.g_idx"
        if order not in available:
            return wanted
        return [*wanted, WantedWeight(order, (columns,), is_first=True)]

    def boxes(self, weight: WantedWeight, cut: Cut) -> tuple[Box, ...]:
        is_codes = weight.name.endswith(".qweight")
        return ((words_of(cut.columns, self.bits), cut.rows),) if is_codes else ()

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        return block_form(columns, self._group(columns), self._groups(part, columns, pieces))

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        return group_grid(columns, self._group(columns), self._groups(part, columns, pieces))

    def _groups(self, part: Part, columns: int, pieces: Pieces) -> Tensor | None:
        return column_groups(pieces, f"{module_of(part)}.g_idx", columns, self._group(columns))

    def read(self, part: Part, columns: int, pieces: Pieces) -> Blocks | Tensor:
        module = module_of(part)
        codes = unpack(tensor_of(pieces, f"{module}.qweight", torch.int32), self.bits, 0).T
        zeros = (
            unpack(tensor_of(pieces, f"{module}.qzeros", torch.int32), self.bits, 1).T.int()
            + self.zero_offset
        )
        scale = scales_of(pieces, f"{module}.scales").T
        return grouped_rows(
            codes,
            self.bits,
            scale,
            zeros,
            self._group(columns),
            self._groups(part, columns, pieces),
        )

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return [READING, self.bits, self.group_size, self.zero_offset]
