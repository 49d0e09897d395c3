"""The worker half: fills blocks with numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pegboard.data.batch import TransferReport
from pegboard.interfaces.attention import KVGroup, KVView
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_kv.plan import TransferPlan, decode
from pegboard_kv_connector_decode_bench.options import DecodeBenchOptions

SEED = 0
"""Every engine fills its blocks with the same sequence of numbers."""
MAX_RANDOM = 1 << 24
"""Random numbers that are drawn at once. They need 4 bytes each beside the KV cache."""


class DecodeBenchWorker:
    """Fills blocks on the device, as bytes, because torch cannot index every type that a KV cache
    may have."""

    def __init__(self, options: DecodeBenchOptions, setup: KVConnectorSetup) -> None:
        self._options = options
        self._groups: list[list[Tensor]] = []
        self._plan = TransferPlan()

    def register(self, views: Mapping[int, KVView], groups: Sequence[KVGroup]) -> None:
        self._groups = [
            [
                tensor.view(len(tensor), -1)
                for layer in group.layers
                for tensor in views[layer].values()
            ]
            for group in groups
        ]
        device = next(tensor.device for tensors in self._groups for tensor in tensors)
        self._generator = torch.Generator(device).manual_seed(SEED)

    def save(self, plan: bytes) -> None:
        self._plan = decode(plan)

    @torch.inference_mode()
    def begin(self, plan: bytes) -> None:
        for group, tensors in enumerate(self._groups):
            block_ids = [
                place.block_id
                for places in self._plan.loads.values()
                for place in places
                if place.group == group
            ]
            if block_ids:
                ids = torch.tensor(block_ids, device=self._generator.device)
                for tensor in tensors:
                    self._fill(tensor, ids)

    def _fill(self, tensor: Tensor, ids: Tensor) -> None:
        """Fill rows of a tensor [blocks, numbers of a block]."""
        width = tensor.shape[1]
        memory = tensor.view(torch.uint8)
        if not self._options.fill_std:
            row = torch.full((1, width), self._options.fill_mean, device=tensor.device)
            memory.index_copy_(0, ids, row.to(tensor.dtype).view(torch.uint8).expand(len(ids), -1))
            return
        for part in ids.split(max(1, MAX_RANDOM // width)):
            rows = torch.empty(len(part), width, device=tensor.device).normal_(
                self._options.fill_mean, self._options.fill_std, generator=self._generator
            )
            memory.index_copy_(0, part, rows.to(tensor.dtype).view(torch.uint8))

    def end(self) -> TransferReport:
        return TransferReport(saved=[], loaded=list(self._plan.loads), failed={})

    def close(self) -> None:
        """There is nothing to close."""
