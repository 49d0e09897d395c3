"""The events about blocks that can be found: what a memory stores and drops."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.engine.kv.special_rules import StateRule, make_rule
from pegboard.engine.requests import Request
from pegboard.interfaces.attention import KVPlan
from pegboard.interfaces.metrics import BlocksCleared, BlocksRemoved, BlocksStored, KVEvent
from pegboard.interfaces.scheduling_policy import RequestView


class KVEvents:
    """Collects the events of a memory; medium: its name, None = the KV cache. events: those of all
    memories. States have no events, because no router can tell where they were saved."""

    def __init__(
        self, plan: KVPlan, medium: str | None = None, events: list[KVEvent] | None = None
    ) -> None:
        self._plan = plan
        self._medium = medium
        self._events: list[KVEvent] = [] if events is None else events
        self._rules = [make_rule(group, plan.hash_block_size) for group in plan.groups]

    def of(self, medium: str) -> KVEvents:
        """Return what the memory of a connector reports to. `take` returns these events, too."""
        return KVEvents(self._plan, medium, self._events)

    def stored(self, request: RequestView, group: int, indices: Sequence[int]) -> None:
        """See `pegboard.interfaces.kv_connector.MemoryEvents`. There is one event for each run of
        consecutive blocks."""
        assert isinstance(request, Request)
        rule = self._rules[group]
        # embeddings and images have no token ids to tell
        if not indices or isinstance(rule, StateRule) or request.prompt_embeds or request.media:
            return
        size = rule.block_size
        hashes = request.block_hashes
        lora = request.lora
        starts = [i for i, before in zip(indices, [-2, *indices], strict=False) if i != before + 1]
        for start, after in zip(starts, [*starts[1:], indices[-1] + 1], strict=True):
            run = [i for i in indices if start <= i < after]
            event = BlocksStored(
                tuple(rule.block_hash(hashes, i) for i in run),
                rule.block_hash(hashes, start - 1) if start else None,
                tuple(request.all_token_ids[start * size : (run[-1] + 1) * size]),
                size,
                group,
                lora.lora_int_id if lora else None,
                lora.lora_name if lora else None,
                None if start else request.cache_salt,
                self._medium,
            )
            self._events.append(event)

    def removed(self, group: int, block_hash: bytes) -> None:
        """See `pegboard.interfaces.kv_connector.MemoryEvents`."""
        if not isinstance(self._rules[group], StateRule):
            self._events.append(BlocksRemoved((block_hash,), group, self._medium))

    def cleared(self) -> None:
        """All blocks of all memories are forgotten."""
        self._events.append(BlocksCleared())

    def take(self) -> list[KVEvent]:
        """Return the events since the last call, in order."""
        events = self._events.copy()
        self._events.clear()
        return events
