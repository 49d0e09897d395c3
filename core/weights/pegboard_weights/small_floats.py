"""Reads tensors of 8-bit and 4-bit floats as `FloatCodes`."""

from __future__ import annotations

import torch
from torch import Tensor

from pegboard.ops.float_codes import FloatCodes, float8_values
from pegboard_weights.stored_weight import Pieces, code_form, tensor_of

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def float8_rows(pieces: Pieces, name: str, scale: Tensor, block: tuple[int, int]) -> FloatCodes | Tensor:
    """Return the 8-bit floats [rows, columns] of a tensor, of any of the four types, with their scales. See `FloatCodes`. Raises
    ModelError if the tensor is stored as something else."""
    stored = tensor_of(pieces, name, *FLOAT8)
    return packed_if_possible(FloatCodes(stored.view(torch.uint8), float8_values(stored.dtype), scale, block))


def packed_if_possible(codes: FloatCodes) -> FloatCodes | Tensor:
    """Return the codes, or the values as floats if kernels do not take codes of this shape. See `code_form`."""
    return codes if code_form(codes.codes.shape[1], codes.block[1]) == "code_weight" else codes.dense()


def nibbles(packed: Tensor) -> Tensor:
    """Return the 4-bit codes in bytes, the low half of each byte first: uint8 [rows, n] → uint8 [rows, 2n]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
