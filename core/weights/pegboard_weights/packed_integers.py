"""Integers of 2 to 8 bits that are packed into 32-bit words."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Return the integers of a stream of bits along `dim` of int32 `words`, the lowest bit first,
    as uint8. An integer may begin in one word and end in the next: 32 integers take `bits` words.
    If the last words are not full, more integers are returned than were packed."""
    words = words.movedim(dim, -1).contiguous()
    *outer, num_words = words.shape
    stream = words.view(torch.uint8)  # little-endian, as the files are
    if bits == 8:
        out = stream
    elif bits == 4:
        out = torch.stack((stream & 15, stream >> 4), dim=-1)
    elif bits == 2:
        out = torch.stack([stream >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    else:  # 8 integers take `bits` bytes
        stream = functional.pad(stream, (0, -(num_words * 4) % bits))
        groups = stream.reshape(*outer, -1, bits).long()
        joined = groups[..., 0]
        for i in range(1, bits):
            joined = joined | groups[..., i] << (8 * i)
        out = torch.stack([joined >> (bits * i) & ((1 << bits) - 1) for i in range(8)], dim=-1).to(
            torch.uint8
        )
    return out.reshape(*outer, -1).movedim(-1, dim)
