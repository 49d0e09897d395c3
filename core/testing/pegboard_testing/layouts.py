"""Writes how formats of quantized weights pack numbers, for the tests of the plugins that read
them. The functions follow the formats' definitions number by number, and share nothing with the
readers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""What the codes of FP4 (E2M1) stand for."""


def bit_stream(codes: np.ndarray, bits: int) -> Tensor:
    """Pack unsigned codes [n, m] along n: one after the other in a stream of bits, the lowest bit
    first, in words of 32 bits. Returns int32 [n · bits / 32, m], rounded up."""
    n, m = codes.shape
    flags = (
        (codes[:, None, :] >> np.arange(bits)[None, :, None] & 1)
        .reshape(n * bits, m)
        .astype(np.uint32)
    )
    flags = np.pad(flags, ((0, -(n * bits) % 32), (0, 0)))
    packed = (flags.reshape(-1, 32, m) << np.arange(32, dtype=np.uint32)[None, :, None]).sum(
        1, dtype=np.uint32
    )
    return torch.from_numpy(packed.view(np.int32))


def nibble_pairs(codes: np.ndarray) -> Tensor:
    """Put two 4-bit codes into a byte, the even column in the low half: [rows, columns] → uint8
    [rows, columns / 2]."""
    return torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))


def marlin_24(codes: np.ndarray, bits: int) -> tuple[Tensor, Tensor]:
    """Return the words and the places of Marlin's 2:4 sparse layout: int32 [columns / 32, rows ·
    bits / 2], and int16 [columns / 32, rows · 2]. codes: unsigned [rows, columns]; at least two of
    four consecutive columns are 2^(bits − 1)."""
    rows, columns = codes.shape
    fours = codes.reshape(-1, 4)
    places = np.sort(np.argsort(fours == 1 << (bits - 1), axis=1, kind="stable")[:, :2], axis=1)
    kept = np.take_along_axis(fours, places, 1).reshape(rows, -1)
    return _words_of_marlin_24(kept, bits), _meta_of_marlin_24(places.reshape(rows, -1, 8))


def _words_of_marlin_24(kept: np.ndarray, bits: int) -> Tensor:
    """kept: [rows, columns / 2]. Every 64 rows and 16 columns are stored together, thread after
    thread."""
    order = []
    for thread in range(32):
        row = 16 * (thread // 8) + 8 * (thread // 4 % 2)
        top = 2 * (thread % 4)
        for step in range(4):
            order += [(row + step + low, top + k) for low in (0, 4) for k in (0, 1, 8, 9)]
    of_rows, of_columns = np.array(order).T
    # [1024, rows / 64, columns / 32]
    tiles = kept.reshape(len(kept) // 64, 64, -1, 16)[:, of_rows, :, of_columns]
    in_word = (0, 2, 4, 6, 1, 3, 5, 7) if bits == 4 else (0, 2, 1, 3)
    codes = (
        tiles.transpose(2, 1, 0)
        .reshape(tiles.shape[2], -1, len(in_word))[:, :, in_word]
        .astype(np.uint32)
    )
    words = (codes << (bits * np.arange(len(in_word), dtype=np.uint32))).sum(2, dtype=np.uint32)
    return torch.from_numpy(words.view(np.int32))


def _meta_of_marlin_24(places: np.ndarray) -> Tensor:
    """places: of 8 kept codes among four columns each, [rows, columns / 16, 8]."""
    rows, count, _ = places.shape
    meta = np.zeros(rows * count, np.uint16)
    numbers = (places << 2 * np.arange(8)).sum(2).astype(np.uint16)
    for row in range(rows):
        to_row = row // 64 * 64 + row % 2 * 2 + row // 4 % 2 + row // 2 % 2 * 32 + row % 64 // 8 * 4
        for column in range(count):
            up = 1 if to_row % 2 < column % 2 else -1 if to_row % 2 > column % 2 else 0
            meta[(column - up) // 2 * 2 * rows + 2 * (to_row + up) + (column - up) % 2] = numbers[
                row, column
            ]
    return torch.from_numpy(meta.view(np.int16)).view(count // 2, 2 * rows)


def scales_of_marlin_24(scales: np.ndarray, columns: int) -> Tensor:
    """Return scales [rows, groups] as that layout stores them: [groups, rows]. If half of the
    columns are more than a group, the rows of 64 are in another order."""
    stored = scales.T.copy()
    if columns // scales.shape[1] < columns // 2:
        order = [8 * i + j for i in range(8) for j in (0, 4, 1, 5, 2, 6, 3, 7)]
        stored = stored.reshape(-1, 64)[:, order].reshape(stored.shape)
    return torch.from_numpy(np.ascontiguousarray(stored))
