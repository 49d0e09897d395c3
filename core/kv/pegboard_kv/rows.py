"""The blocks of one KV group as rows of bytes on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pegboard.interfaces.attention import KVView


def as_words(rows: Tensor) -> Tensor:
    """View uint8 [n, bytes] as int64 [n, bytes / 8] if that is possible. torch copies rows of words
    several times faster."""
    fits = not any(number % 8 for number in (rows.shape[1], rows.stride(0), rows.storage_offset()))
    return rows.view(torch.int64) if fits else rows


class BlockRows:
    """Copies blocks between the KV memory and rows of bytes. A row holds, for every layer of the
    group in order, the block's part of every tensor of the layer. A pipeline stage may have no
    layer of a group. Its rows have no bytes.

    parts: (name, dtype, shape of a block) of every tensor, in the order of the row. num_bytes: of a
    row. device: of the KV memory. views: layer index → the layer's tensors, each [num_blocks, …],
    in which a block is contiguous."""

    def __init__(self, views: Mapping[int, KVView], layers: Sequence[int]) -> None:
        tensors = {
            f"layers.{layer}.{name}": tensor
            for layer in layers
            for name, tensor in views[layer].items()
        }
        self.parts = [
            (name, tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in tensors.items()
        ]
        memory = [tensor.view(len(tensor), -1).view(torch.uint8) for tensor in tensors.values()]
        self.num_bytes = sum(part.shape[1] for part in memory)
        words = [as_words(part) for part in memory]
        self._memory = words if all(part.dtype == torch.int64 for part in words) else memory
        self._sizes = [part.shape[1] for part in self._memory]
        self._like = self._memory[0] if self._memory else torch.empty(0, dtype=torch.uint8)
        self.device = self._like.device

    def read(self, block_ids: Sequence[int]) -> Tensor:
        """Return copies of the blocks: uint8 [number of blocks, num_bytes] on the host."""
        return self.gather(torch.tensor(block_ids, device=self.device)).cpu()

    def write(self, block_ids: Sequence[int], rows: Tensor) -> None:
        """Copy rows, contiguous uint8 [number of blocks, num_bytes] on the host, into the
        blocks."""
        self.scatter(torch.tensor(block_ids, device=self.device), rows.to(self.device))

    def gather(self, block_ids: Tensor) -> Tensor:
        """Return copies of the blocks, uint8 [number of blocks, num_bytes]. They are on the device,
        like block_ids, int64."""
        rows = self._like.new_empty(len(block_ids), sum(self._sizes))
        if self.num_bytes:
            for part, memory in zip(rows.split(self._sizes, 1), self._memory, strict=True):
                torch.index_select(memory, 0, block_ids, out=part)
        return rows.view(torch.uint8)

    @torch.inference_mode()
    def scatter(self, block_ids: Tensor, rows: Tensor) -> None:
        """Copy rows, contiguous uint8 [number of blocks, num_bytes], into the blocks. All is on the
        device."""
        if not self.num_bytes:
            return
        rows = rows.view(self._like.dtype)
        for part, memory in zip(rows.split(self._sizes, 1), self._memory, strict=True):
            memory.index_copy_(0, block_ids, part)
