"""The blocks of one KV group as rows of bytes on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pegboard.interfaces.attention import KVView


class BlockRows:
    """Copies blocks between the KV memory and rows of bytes. A row holds, for every layer of the group in order, the block's part
    of every tensor of the layer.

    parts: (name, dtype, shape of a block) of every tensor, in the order of the row. num_bytes: of a row. views: layer index → the
    layer's tensors, each [num_blocks, …], in which a block is contiguous."""

    def __init__(self, views: Mapping[int, KVView], layers: Sequence[int]) -> None:
        tensors = {f"layers.{layer}.{name}": tensor for layer in layers for name, tensor in views[layer].items()}
        self.parts = [(name, tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in tensors.items()]
        self._memory = [tensor.view(len(tensor), -1).view(torch.uint8) for tensor in tensors.values()]
        self._sizes = [memory.shape[1] for memory in self._memory]
        self.num_bytes = sum(self._sizes)

    def read(self, block_ids: Sequence[int]) -> Tensor:
        """Return copies of the blocks: uint8 [number of blocks, num_bytes] on the host."""
        rows = torch.empty(len(block_ids), self.num_bytes, dtype=torch.uint8)
        ids = torch.tensor(block_ids, device=self._memory[0].device)
        for part, memory in zip(rows.split(self._sizes, 1), self._memory, strict=True):
            part.copy_(memory[ids])
        return rows

    @torch.inference_mode()
    def write(self, block_ids: Sequence[int], rows: Tensor) -> None:
        """Copy rows, uint8 [number of blocks, num_bytes] on the host, into the blocks."""
        ids = torch.tensor(block_ids, device=self._memory[0].device)
        for part, memory in zip(rows.split(self._sizes, 1), self._memory, strict=True):
            memory[ids] = part.to(memory.device)
