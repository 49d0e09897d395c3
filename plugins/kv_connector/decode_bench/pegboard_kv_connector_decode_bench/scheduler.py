"""The scheduler half: says that it has every prompt. It imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pegboard.data.batch import Batch, TransferReport
from pegboard.interfaces.kv_connector import BlockView, KVConnectorSetup, Match, Release
from pegboard.interfaces.scheduling_policy import RequestView
from pegboard.log import get_logger
from pegboard_kv.plan import Place, TransferPlan, encode
from pegboard_kv_connector_decode_bench.options import DecodeBenchOptions

log = get_logger(__name__)


class DecodeBenchScheduler:
    """All tokens but the last one of a request are filled in the step that computes the last
    one."""

    def __init__(self, options: DecodeBenchOptions, setup: KVConnectorSetup) -> None:
        self._sizes = [group.block_size for group in setup.plan.groups]
        self._fills: dict[str, list[Place]] = {}
        log.warning(
            "decode_bench fills the KV cache with made-up values: every answer of this engine is "
            "meaningless; use it for benchmarks only"
        )

    def match(self, request: RequestView, num_local_tokens: int) -> Match:
        return Match(max(0, request.num_tokens - 1 - num_local_tokens))

    def allocated(self, request: RequestView, blocks: BlockView, num_external_tokens: int) -> None:
        """Blocks that also hold local tokens are left alone. The last block is filled as a whole,
        because what comes later is written by the step and by later ones."""
        if not num_external_tokens:
            return
        end = request.num_computed_tokens
        start = end - num_external_tokens
        self._fills[request.key] = [
            Place(group, table[index], 0, b"", index * size)
            for group, (table, size) in enumerate(zip(blocks.block_ids, self._sizes, strict=True))
            for index in range(-(-start // size), -(-end // size))
            if table[index]
        ]

    def plan(self, batch: Batch) -> bytes:
        plan = TransferPlan(self._fills)
        self._fills = {}
        return encode(plan)

    def released(
        self,
        request: RequestView,
        blocks: BlockView,
        why: Literal["finished", "aborted", "preempted"],
    ) -> Release:
        """A fill that no plan has yet named is forgotten: the blocks may get another owner."""
        self._fills.pop(request.key, None)
        return Release()

    def update(self, reports: Sequence[TransferReport]) -> None:
        """Every fill ends within its step."""

    def reset(self) -> None:
        """There is no store."""
