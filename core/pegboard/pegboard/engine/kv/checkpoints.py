"""The states of requests that the prefix cache keeps."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.engine.kv.pool import BlockPool
from pegboard.engine.kv.request_blocks import Copy, RequestBlocks
from pegboard.engine.kv.rules import FullRule
from pegboard.engine.kv.special_rules import StateRule


class Checkpoints:
    """Copies of states, in blocks of the pool. rules: of all KV groups. groups: which of them have
    states."""

    def __init__(self, pool: BlockPool, rules: Sequence[FullRule]) -> None:
        self._pool = pool
        self._rules = [(i, rule) for i, rule in enumerate(rules) if isinstance(rule, StateRule)]
        self.groups = [index for index, _ in self._rules]

    def keep(self, blocks: RequestBlocks, num_tokens: int) -> list[Copy]:
        """Return the copies of a request's states after `num_tokens` tokens, to run before its next
        step. There are none if blocks are short, or the second time at the same place: after wrong
        drafts, the states are others until the step begins."""
        if blocks.checkpoint is not None or num_tokens == blocks.checkpoint_at:
            return []
        blocks.checkpoint_at = num_tokens
        taken = self._pool.take(len(self.groups))
        if taken is None:
            return []
        blocks.checkpoint = (num_tokens, tuple(taken))
        sources = [blocks.tables[index][0] for index in self.groups]
        self._pool.touch(sources)
        return list(zip(self.groups, sources, taken, strict=True))

    def publish(self, blocks: RequestBlocks, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Insert the copies of before a step into the cache, once their tokens are known. Then
        release the request's reference."""
        if blocks.checkpoint is None or num_tokens <= blocks.checkpoint[0]:
            return
        at, block_ids = blocks.checkpoint
        self._insert(hashes, at, block_ids)
        blocks.checkpoint = None
        self._pool.free(block_ids)

    def keep_loaded(
        self, blocks: RequestBlocks, hashes: Sequence[bytes], num_tokens: int
    ) -> list[Copy]:
        """Insert a request's states after `num_tokens` tokens into the cache at once: they stay in
        their blocks. Return the copies that the request gets instead. Do nothing if blocks are
        short."""
        taken = self._pool.take(len(self.groups))
        if taken is None:
            return []
        sources = [blocks.tables[index][0] for index in self.groups]
        self._insert(hashes, num_tokens, sources)
        for index, block_id in zip(self.groups, taken, strict=True):
            blocks.tables[index][0] = block_id
        return list(zip(self.groups, sources, taken, strict=True))

    def _insert(self, hashes: Sequence[bytes], num_tokens: int, block_ids: Sequence[int]) -> None:
        for (index, rule), block_id in zip(self._rules, block_ids, strict=True):
            self._pool.insert(index, rule.checkpoint_hash(hashes, num_tokens), block_id)
