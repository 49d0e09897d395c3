"""The block tables of all requests in all KV groups, and the prefix cache over them. It uses no
torch and does no scheduling.

Every entry of a request's table holds one reference to its block. So does a KV connector that still
reads the block, and so does a block copy that has not run yet, for its source. A block without
references is free, and the prefix cache can find it until it is reused. Arguments `num_tokens`
count from the start of the request. A table may contain 0, the null block, where keys and values
were dropped (they left the window) or were never needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from pegboard.config.limits import Limits
from pegboard.engine.kv.checkpoints import Checkpoints
from pegboard.engine.kv.events import KVEvents
from pegboard.engine.kv.hashes import BlockHasher
from pegboard.engine.kv.pool import NULL_BLOCK, BlockPool
from pegboard.engine.kv.request_blocks import Copy, NewBlocks, RequestBlocks
from pegboard.engine.kv.residency import BlockResidency
from pegboard.engine.kv.special_rules import StateRule, make_rule
from pegboard.engine.requests import Request
from pegboard.interfaces.attention import KVPlan


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A cached prefix: its length, and for each group the cached blocks that contain it (0 = not
    needed). It holds no references, so it is valid only until blocks are next taken from the
    pool."""

    num_tokens: int
    block_ids: tuple[list[int], ...]


class KVCache:
    """Only the scheduler calls it. `allocate` and `commit` are hot: they run once per running
    request and step.

    has_states: a group stores a state per request. checkpoint_every: all states are kept at
    multiples of this number of tokens, by the prefix cache and by KV connectors, so a prefill chunk
    should end there; 0 = states are not kept.
    """

    def __init__(self, plan: KVPlan, limits: Limits, events: KVEvents | None = None) -> None:
        self.plan = plan
        share = limits.kv_metrics_share
        self.pool = BlockPool(
            plan.num_blocks,
            residency=BlockResidency(share) if share else None,
            events=events,
        )
        self._events = events
        self.rules = [make_rule(group, plan.hash_block_size) for group in plan.groups]
        self._enable_prefix_caching = limits.enable_prefix_caching
        self._checkpoints = Checkpoints(self.pool, self.rules)
        self._state_groups = self._checkpoints.groups
        self.has_states = bool(self._state_groups)
        self._token_groups = [i for i in range(len(self.rules)) if i not in self._state_groups]
        self._alignment = math.lcm(
            plan.hash_block_size, *(self.rules[i].block_size for i in self._token_groups)
        )
        self._finders: list[Callable[[bytes], int | None]] = [
            partial(self.pool.find, i) for i in range(len(self.rules))
        ]
        every = [rule.checkpoint_every for rule in self.rules if isinstance(rule, StateRule)]
        self.checkpoint_every = math.lcm(*every) if every else 0
        self.hasher = BlockHasher(limits.hash_algo, plan.hash_block_size, plan.identity)
        self._nothing: NewBlocks = tuple([] for _ in self.rules)
        self._blocks: dict[str, RequestBlocks] = {}
        self._copies: list[tuple[str, Copy]] = []
        self._more = (limits.stored_drafts, 0) if limits.stored_drafts else (0,)

    # --- queries ----------------------------------------------------------------------------------

    def holds(self, request: Request) -> bool:
        """Return whether the request has block tables."""
        return request.key in self._blocks

    def tables(self, request: Request) -> NewBlocks:
        """Return the request's tables, one per group. They are not copies and must not be
        changed."""
        return self._blocks[request.key].tables

    def can_resume(self, request: Request, num_tokens: int) -> bool:
        """Return whether the request can compute from token `num_tokens` on: it has all blocks that
        it would read or write."""
        if self.has_states:
            return False
        for index in self._token_groups:
            rule = self.rules[index]
            table = self.tables(request)[index]
            expired = rule.expired(num_tokens)
            if any(block_id == NULL_BLOCK and i not in expired for i, block_id in enumerate(table)):
                return False
        return True

    # --- prefix cache -----------------------------------------------------------------------------

    def lookup(self, request: Request) -> PrefixHit:
        """Return the longest cached prefix that all groups can serve. It never includes the last
        token, which must be computed to sample. A rule can only shorten the prefix, so all rules
        are asked in turn until none shortens it. No block is taken."""
        if not self._enable_prefix_caching:
            return PrefixHit(0, self._nothing)
        self.hasher.extend(request)
        hashes = request.block_hashes
        num_tokens = min(request.num_tokens - 1, len(hashes) * self.plan.hash_block_size)
        before = -1
        while num_tokens != before:
            before = num_tokens
            for rule, find in zip(self.rules, self._finders, strict=True):
                num_tokens = rule.hit(find, hashes, num_tokens, self._alignment)
        if num_tokens == 0:
            return PrefixHit(0, self._nothing)
        pairs = zip(self.rules, self._finders, strict=True)
        return PrefixHit(
            num_tokens, tuple(rule.hit_blocks(find, hashes, num_tokens) for rule, find in pairs)
        )

    def commit(self, request: Request, num_tokens: int) -> None:
        """Record that the first `num_tokens` tokens are known and that their keys and values are
        valid. Full blocks can now be found, and blocks that later tokens never read are dropped."""
        blocks = self._blocks[request.key]
        if num_tokens < blocks.wake_at:
            return
        if self._enable_prefix_caching:
            self.hasher.extend(request)
            for index in self._token_groups:
                self._publish(request, blocks, index, num_tokens)
            self._checkpoints.publish(blocks, request.block_hashes, num_tokens)
        keeps = request.num_waiting_children and blocks.keeps_for_children
        keep_from = min(num_tokens, request.num_prompt_tokens - 1) if keeps else num_tokens
        for index in self._token_groups:
            self._drop_expired(blocks, index, keep_from)
        blocks.wake_at = self._next_wake(keep_from)

    def stop_keeping(self, request: Request) -> bool:
        """Drop the blocks outside the window, which the request keeps only so that children can
        fork from it. The scheduler calls this when blocks are short, before it preempts. Return
        whether any block became free."""
        blocks = self._blocks[request.key]
        num_free = self.pool.num_free
        blocks.keeps_for_children = False
        for index in self._token_groups:
            self._drop_expired(blocks, index, request.num_confirmed_tokens)
        return self.pool.num_free > num_free

    def _publish(
        self, request: Request, blocks: RequestBlocks, index: int, num_tokens: int
    ) -> None:
        rule = self.rules[index]
        table = blocks.tables[index]
        hashes = request.block_hashes
        num_full = num_tokens // rule.block_size
        new = range(blocks.num_hashed[index], num_full)
        stored = [
            i
            for i in new
            if table[i] != NULL_BLOCK
            and self.pool.insert(index, rule.block_hash(hashes, i), table[i])
        ]
        if self._events is not None:
            self._events.stored(request, index, stored)
        blocks.num_hashed[index] = max(blocks.num_hashed[index], num_full)

    def _drop_expired(self, blocks: RequestBlocks, index: int, num_tokens: int) -> None:
        expired = self.rules[index].expired(num_tokens)
        table = blocks.tables[index]
        start = max(expired.start, blocks.num_dropped[index])
        stop = min(expired.stop, len(table))
        if start >= stop:
            return
        self.pool.free(table[i] for i in reversed(range(start, stop)))
        table[start:stop] = [NULL_BLOCK] * (stop - start)
        blocks.num_dropped[index] = stop

    def _next_wake(self, num_tokens: int) -> int:
        """Return the next number of tokens at which a block becomes full or expires, or a
        checkpoint can be inserted."""
        if self._state_groups:
            return num_tokens + 1
        step = self.plan.hash_block_size
        next_full = num_tokens - num_tokens % step + step
        return min(next_full, *(self.rules[i].next_expiry(num_tokens) for i in self._token_groups))

    # --- blocks of a request ----------------------------------------------------------------------

    def allocate(
        self,
        request: Request,
        num_tokens: int,
        *,
        hit: PrefixHit | None = None,
        num_computed_tokens: int = 0,
    ) -> NewBlocks | None:
        """Make room for `num_tokens` tokens in all groups. Return the appended block ids per group,
        including shared blocks. Return None and change nothing if blocks are short.

        hit: a prefix to share, given only in the first call for a request. num_computed_tokens: in
        the first call, how many tokens are computed before the step (the hit, and what a connector
        loads). Blocks that later tokens do not read are not allocated for them.

        If blocks are not short, there is also room for the tokens that a draft model stores.
        """
        for more in self._more:
            if (
                blocks := self._allocate(request, num_tokens + more, hit, num_computed_tokens)
            ) is not None:
                return blocks
        return None

    def _allocate(
        self, request: Request, num_tokens: int, hit: PrefixHit | None, num_computed_tokens: int
    ) -> NewBlocks | None:
        blocks = self._blocks.get(request.key)
        if blocks is None:
            return self._start(
                request, num_tokens, hit or PrefixHit(0, self._nothing), num_computed_tokens
            )
        return self._nothing if num_tokens <= blocks.capacity else self._grow(blocks, num_tokens)

    def _grow(self, blocks: RequestBlocks, num_tokens: int) -> NewBlocks | None:
        counts = [0] * len(self.rules)
        for index in self._token_groups:
            counts[index] = max(
                0, self.rules[index].blocks_needed(num_tokens) - len(blocks.tables[index])
            )
        taken = self.pool.take(sum(counts))
        return None if taken is None else self._append(blocks, counts, taken)

    def _append(self, blocks: RequestBlocks, counts: Iterable[int], taken: list[int]) -> NewBlocks:
        """Append the `taken` blocks to the tables: to each group's table the number in `counts`."""
        start = 0
        new = []
        for table, count in zip(blocks.tables, counts, strict=True):
            part = taken[start : start + count]
            table.extend(part)
            new.append(part)
            start += count
        self._measure(blocks)
        return tuple(new)

    def _measure(self, blocks: RequestBlocks) -> None:
        sizes = [self.rules[i].capacity(len(blocks.tables[i])) for i in self._token_groups]
        blocks.capacity = min(sizes, default=1 << 60)

    def _start(
        self, request: Request, num_tokens: int, hit: PrefixHit, num_computed_tokens: int
    ) -> NewBlocks | None:
        shared = [b for i in self._token_groups for b in hit.block_ids[i]]
        # what a connector loads takes the place of the hit's states
        has_states = num_computed_tokens <= hit.num_tokens
        sources = [b for i in self._state_groups if has_states for b in hit.block_ids[i]]
        layouts = [
            self._first_layout(index, num_tokens, hit, num_computed_tokens)
            for index in range(len(self.rules))
        ]
        num_fresh = sum(sum(layout) for layout in layouts)
        if num_fresh > self.pool.num_free - self.pool.count_free([*shared, *sources]):
            return None
        self.pool.touch(shared)
        self.pool.touch(sources)  # released when the copy is done
        blocks = self._blocks[request.key] = RequestBlocks(len(self.rules))
        taken = self.pool.take(num_fresh)
        assert taken is not None, "counted above"
        fresh = iter(taken)
        for index, (table, layout) in enumerate(zip(blocks.tables, layouts, strict=True)):
            if index in self._token_groups:
                table.extend(hit.block_ids[index])
                blocks.num_hashed[index] = len(table)
            table.extend(next(fresh) if is_needed else NULL_BLOCK for is_needed in layout)
        self._measure(blocks)
        for index, source in zip(self._state_groups, sources, strict=False):
            self._copies.append((request.key, (index, source, blocks.tables[index][0])))
        return blocks.tables

    def _first_layout(
        self, index: int, num_tokens: int, hit: PrefixHit, num_computed_tokens: int
    ) -> list[bool]:
        """Return, for one group of a new request, which table entries after the shared ones need a
        block. The others are null."""
        rule = self.rules[index]
        if index in self._state_groups:
            return [True] * rule.blocks_needed(num_tokens)
        expired = rule.expired(num_computed_tokens)
        return [
            i not in expired
            for i in range(len(hit.block_ids[index]), rule.blocks_needed(num_tokens))
        ]

    def fork(self, parent: Request, child: Request) -> bool:
        """Let a completion of n > 1 start from its parent's blocks. The child shares the prompt's
        blocks up to the one with the last prompt token, of which it gets a copy. All its prompt
        tokens except the last count as computed. Return False and change nothing if that is not
        possible: no token counts as computed, blocks are short, the parent has dropped blocks that
        the child needs, or a group stores states."""
        num_computed = child.num_prompt_tokens - 1
        counts = [
            rule.blocks_needed(num_computed + 1) - rule.num_shared(num_computed)
            for rule in self.rules
        ]
        if (
            not num_computed
            or not self.can_resume(parent, num_computed)
            or (taken := self.pool.take(sum(counts))) is None
        ):
            return False
        fresh = iter(taken)
        blocks = self._blocks[child.key] = RequestBlocks(len(self.rules))
        for index, (rule, shared) in enumerate(zip(self.rules, self.tables(parent), strict=True)):
            last = rule.num_shared(num_computed)
            expired = rule.expired(num_computed)
            table = [
                NULL_BLOCK if i in expired else block_id for i, block_id in enumerate(shared[:last])
            ]
            self.pool.touch(table)
            blocks.tables[index].extend(table)
            blocks.num_hashed[index] = last
            new = [next(fresh) for _ in range(counts[index])]
            if new and num_computed % rule.block_size:
                self.pool.touch([shared[last]])
                self._copies.append((child.key, (index, shared[last], new[0])))
        self._append(blocks, counts, taken)
        return True

    def checkpoint(self, request: Request, num_computed_tokens: int) -> None:
        """Copy the request's states before its next step, if the prefix cache keeps them there and
        blocks are not short."""
        every = self.checkpoint_every if self._enable_prefix_caching else 0
        if every and not num_computed_tokens % every:
            copies = self._checkpoints.keep(self._blocks[request.key], num_computed_tokens)
            self._copies += [(request.key, copy) for copy in copies]

    def keep_loaded(self, request: Request, num_tokens: int) -> None:
        """Let the prefix cache find the states after `num_tokens` tokens, which a connector has
        loaded for a request that waits, if blocks are not short."""
        if self._state_groups and self._enable_prefix_caching:
            blocks = self._blocks[request.key]
            copies = self._checkpoints.keep_loaded(blocks, request.block_hashes, num_tokens)
            self._copies += [(request.key, copy) for copy in copies]

    def release(self, request: Request) -> None:
        """Free all blocks of the request, the last ones first. Do nothing if the request has
        none."""
        blocks = self._blocks.pop(request.key, None)
        if blocks is None:
            return
        for table in blocks.tables:
            self.pool.free(reversed(table))
        if blocks.checkpoint is not None:
            self.pool.free(blocks.checkpoint[1])
        stale = [copy for key, copy in self._copies if key == request.key]
        self._copies = [entry for entry in self._copies if entry[0] != request.key]
        self.pool.free(source for _, source, _ in stale)

    def take_copies(self) -> list[Copy]:
        """Return the copies to run before the next step's forward. `copies_done` must be called
        after that step."""
        copies = [copy for _, copy in self._copies]
        self._copies.clear()
        return copies

    def copies_done(self, copies: Iterable[Copy]) -> None:
        """Release the sources of these copies. The step that ran them is over."""
        self.pool.free(source for _, source, _ in copies)
