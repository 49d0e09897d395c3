"""What must be true of an engine after every step. It counts what the engine holds a second time,
from its tables, and compares.

A block that is held too long or freed too early changes no token at once, so tests of answers do
not see it. These checks do."""

from __future__ import annotations

from collections import Counter
from copy import copy
from itertools import pairwise

from pegboard.data.batch import Batch
from pegboard.engine.engine import Engine
from pegboard.engine.kv.pool import NULL_BLOCK, BlockPool
from pegboard.engine.kv.request_blocks import RequestBlocks
from pegboard.engine.kv.special_rules import StateRule
from pegboard.engine.loras import Adapter
from pegboard.engine.requests import Request
from pegboard.interfaces.attention import Full
from pegboard.interfaces.scheduling_policy import RequestStatus, StepBudget, StepLoad
from pegboard_testing.fake_executor import FakeExecutor

Cached = tuple[int, tuple[int, bytes]]
"""A block and the name (group, hash) under which the prefix cache finds it."""


class EngineInvariants:
    """Checks every batch of the executor. Call `check` after every step, and `check_idle` when
    nothing is left to do."""

    def __init__(self, engine: Engine, executor: FakeExecutor) -> None:
        self._engine = engine
        self._limits = engine.limits
        executor.on_submit = self.check_batch
        self._live = engine._live
        self._loras = engine._loras
        self._kv = engine._live.kv
        self._scheduler = engine._scheduler
        self._full = [
            i for i, group in enumerate(self._kv.plan.groups) if isinstance(group.spec.retain, Full)
        ]
        self._budget = StepBudget(0, 0, 0, 0)
        self._num_preemptions = 0
        self._seen: dict[int, Request] = {}
        self._chains: dict[str, list[list[Cached]]] = {}
        self._hashed: dict[str, tuple[int, str, int]] = {}

        policy = self._live.waiting._policy
        make_budget = policy.budget

        def budget(load: StepLoad) -> StepBudget:
            self._budget = make_budget(load)
            self._num_preemptions = self._live.totals["num_preemptions_total"]
            return self._budget

        policy.budget = budget  # type: ignore[method-assign]

    def check(self) -> None:
        """Check everything that is true between two steps."""
        self._seen |= {id(request): request for request in self._live}
        self._check_ended()
        self._check_references()
        check_pool(self._kv.pool)
        self._check_tables()
        if self._limits.num_stages == 1:  # with stages, steps in flight may share what is freed
            self._check_eviction_order()
        self._check_hashes()
        self._check_sharing()
        self._check_requests()
        self._check_rows()
        self._check_adapters()

    def check_batch(self, batch: Batch) -> None:
        """Check a batch that is about to be submitted against the limits and what the policy allows
        for it."""
        limits = self._limits
        budget = self._budget
        if self._scheduler._pacing is not None:
            budget = self._scheduler._pacing.limit(budget, self._scheduler._steps[batch.step].load)
        most = min(limits.max_num_batched_tokens, budget.max_tokens)
        assert batch.num_tokens <= most, (
            f"step {batch.step} computes {batch.num_tokens} tokens, the budget is {most}"
        )
        rows = batch.rows.tolist()
        assert len(set(rows)) == len(rows) and set(rows) <= set(range(limits.max_num_seqs)), rows
        assert (batch.num_draft_tokens >= 0).all() and batch.num_draft_tokens.max(
            initial=0
        ) <= limits.max_drafts
        self._check_partial(batch, budget)
        self._check_drafts(batch)
        chunks = batch.num_scheduled_tokens - batch.num_draft_tokens
        assert chunks.min(initial=1) >= 1, "a row computes only drafts, or nothing"
        longest = max(1, min(limits.long_prefill_token_threshold, budget.max_chunk))
        assert (
            not limits.enable_chunked_prefill or limits.whole or chunks.max(initial=0) <= longest
        ), f"chunks {chunks}, the limit is {longest}"

    def _check_partial(self, batch: Batch, budget: StepBudget) -> None:
        """No prompt is begun in chunks beyond the limits. Those that have begun go on, whatever the
        limits are now. None is begun in a step that took blocks from another request."""
        begun = {new.row for new in batch.new}
        owners = self._live.rows.owners
        assert not begun or self._live.totals["num_preemptions_total"] == self._num_preemptions, (
            "it preempts and admits"
        )
        partial = {
            row
            for row, samples in zip(batch.rows.tolist(), batch.samples.tolist(), strict=True)
            if not samples
        }
        long = {
            row
            for row in partial
            if (owner := owners[row]) is not None and owner.num_prompt_tokens > budget.max_chunk
        }
        assert not begun & partial or len(partial) <= budget.max_prefills, (
            f"{len(partial)} partial prefills, {budget}"
        )
        assert not begun & long or len(long) <= budget.max_long_prefills, (
            f"{len(long)} long prefills, {budget}"
        )

    def _check_drafts(self, batch: Batch) -> None:
        """Drafts end before the request does, and rows with drafts come before longer prefills."""
        is_long = (batch.num_scheduled_tokens > 1 + self._limits.max_drafts).tolist()
        assert is_long == sorted(is_long), (
            f"rows with few tokens follow others: {batch.num_scheduled_tokens}"
        )
        for row, num_drafts in zip(
            batch.rows.tolist(), batch.num_draft_tokens.tolist(), strict=True
        ):
            owner = self._live.rows.owners[row]
            if num_drafts and owner is not None:
                room = owner.output_room(self._limits.max_model_len)
                assert num_drafts < room, (
                    f"{owner} verifies {num_drafts} drafts, and {room} tokens may come"
                )

    def check_idle(self) -> None:
        """Check that everything was released: blocks, pins, copies, rows, adapters, and what
        requests say of themselves."""
        live = self._live
        rows = live.rows
        connectors = live.connectors
        pool = self._kv.pool
        assert not live and not live._completions and not live.running
        assert not rows.is_draining and not connectors.loading
        assert not live.waiting and not list(live.waiting), "a request still waits"
        assert not connectors._pins, f"blocks are still pinned: {connectors._pins}"
        assert (
            not self._kv._copies
            and not self._kv._blocks
            and not self._scheduler._steps
            and not self._engine._steps._in_flight
        )
        assert pool.num_free == pool.num_blocks - 1 and not any(pool._num_refs), (
            f"blocks are still held: {pool._num_refs}"
        )
        assert sorted(rows._free) == list(range(len(rows.owners))) and not any(rows.owners)
        assert not self._loras or not self._loras._held
        assert not self._engine._grammars._compilations
        self._check_ended()
        assert not self._seen
        self._chains.clear()
        self._hashed.clear()

    # --- blocks -----------------------------------------------------------------------------------

    def _check_references(self) -> None:
        """Every reference to a block belongs to a table, a checkpoint, a pin or a copy that has not
        run."""
        wanted: Counter[int] = Counter()
        for blocks in self._kv._blocks.values():
            for table in blocks.tables:
                wanted.update(table)
            wanted.update(blocks.checkpoint[1] if blocks.checkpoint else ())
        for pinned in self._live.connectors._pins.values():
            for held in pinned:
                wanted.update(held)
        copies = [waiting for _, waiting in self._kv._copies] + [
            running for step in self._scheduler._steps.values() for running in step.copies
        ]
        wanted.update(source for _, source, _ in copies)
        del wanted[NULL_BLOCK]
        references = {block: count for block, count in enumerate(self._kv.pool._num_refs) if count}
        assert references == dict(wanted), f"references {references}, but holders {dict(wanted)}"

    def _check_tables(self) -> None:
        """A request holds what its rules promised: no block of tokens that are never read again,
        and none for tokens to come."""
        kv = self._kv
        limits = self._limits
        live = {request.key: request for request in self._live}
        draining = {request.key for request in self._live.rows._draining}
        for key, blocks in kv._blocks.items():
            request = live.get(key)
            assert request is not None or key in draining, f"{key} has ended and holds blocks"
            if request is None or key in draining:
                continue
            is_known = request.status is RequestStatus.RUNNING and request.uses_connectors
            for index, (rule, table) in enumerate(zip(kv.rules, blocks.tables, strict=True)):
                if isinstance(rule, StateRule):
                    assert len(table) == rule.blocks_needed(0)
                elif is_known:
                    steps = limits.max_in_flight if limits.drafts_ahead else 1
                    taken_back = limits.max_drafts * steps + kv.has_states
                    longest = rule.blocks_needed(request.num_computed_tokens + taken_back)
                    assert len(table) <= longest, (
                        f"{key} has {len(table)} blocks in group {index}, {longest} are enough"
                    )
            if not request.num_waiting_children and request.status is RequestStatus.RUNNING:
                self._check_dropped(request, blocks)

    def _check_dropped(self, request: Request, blocks: RequestBlocks) -> None:
        kv = self._kv
        known = min(request.num_confirmed_tokens, request.num_tokens)
        for index, (rule, table) in enumerate(zip(kv.rules, blocks.tables, strict=True)):
            held = [i for i, block_id in enumerate(table) if block_id != NULL_BLOCK]
            kept = set(held) & set(rule.expired(known))
            if not request.parent and not self._was_parent(request):
                assert not kept, (
                    f"{request.key} keeps expired blocks {kept} of group {index} after {known} "
                    "tokens"
                )
            most = rule.max_blocks(self._limits.max_model_len, self._limits.chunk_tokens)
            num_held = len(held)
            if isinstance(rule, StateRule) and blocks.checkpoint is not None:
                num_held += 1  # the copy of the state
            assert num_held <= most, (
                f"{request.key} holds {num_held} blocks of group {index}, promised were {most}"
            )

    def _was_parent(self, request: Request) -> bool:
        """Whether the request kept blocks for its children. It drops them at its next commit."""
        return request.params.n > 1 and request.index == 0

    def _check_eviction_order(self) -> None:
        """Of the cached blocks that only a request with full attention held and has left, the first
        ones of its prompt are evicted last. Others that leave in the same step may free a block
        that they shared later."""
        pool = self._kv.pool
        places = {block_id: place for place, block_id in enumerate(pool._free)}
        for key, chains in self._chains.items():
            if key in self._kv._blocks:
                continue
            for chain in chains:
                order = [
                    places[block_id]
                    for block_id, name in chain
                    if block_id in places and pool._key_of.get(block_id) == name
                ]
                assert all(first > later for first, later in pairwise(order)), (
                    f"{key}: a prefix is evicted before what follows"
                )
        held = self._kv._blocks
        holders = Counter(
            b for blocks in held.values() for i in self._full for b in blocks.tables[i]
        )
        self._chains = {
            key: [
                [
                    (b, pool._key_of[b])
                    for b in blocks.tables[i]
                    if b in pool._key_of and holders[b] == 1
                ]
                for i in self._full
            ]
            for key, blocks in held.items()
        }

    def _check_hashes(self) -> None:
        """The names of a running request's blocks are those that its tokens and its adapter have
        now."""
        for request in self._live.running:
            state = (
                request.num_preemptions,
                request.lora.digest if request.lora else "",
                len(request.block_hashes),
            )
            if self._hashed.get(request.key) != state:
                self._hashed[request.key] = state
                again = copy(request)
                again.block_hashes = []
                again.hash_spans = None
                self._kv.hasher.extend(again)
                hashes = again.block_hashes[: len(request.block_hashes)]
                assert hashes == request.block_hashes, (
                    f"{request}: its block hashes are those of other content"
                )

    def _check_sharing(self) -> None:
        """Running requests share blocks only with those that have the same adapter, read from the
        same files."""
        owners: dict[tuple[int, int], str] = {}
        for request in self._live.running:
            digest = request.lora.digest if request.lora else ""
            for index, table in enumerate(self._kv.tables(request)):
                for block_id in filter(None, table):
                    other = owners.setdefault((index, block_id), digest)
                    assert other == digest, (
                        f"{request} shares block {block_id}, which the adapter {other!r} computed"
                    )

    # --- requests ---------------------------------------------------------------------------------

    def _check_ended(self) -> None:
        """A request that ended holds nothing once no child waits for it."""
        requests = (*self._live, *self._live.rows._draining)
        live = {id(request) for request in requests} | {id(request.parent) for request in requests}
        for key in self._seen.keys() - live:
            request = self._seen.pop(key)
            held = (request.row, self._adapter_of(request), request.parent)
            assert held == (None, None, None), (
                f"{request} ended and still has (row, adapter, parent) {held}"
            )
            counted = (request.num_waiting_children, request.num_in_flight_steps)
            assert counted == (0, 0), (
                f"{request} ended with (waiting children, steps in flight) {counted}"
            )

    def _check_requests(self) -> None:
        """Every live request is in one place, and every counter counts what is there."""
        live = self._live
        completions = live._completions
        waiting = [*live.waiting, *live.waiting.held]
        assert len(waiting) == len(live.waiting), (
            f"{len(live.waiting)} are counted as waiting, and {waiting} wait"
        )
        preempted = [r for r in live.rows._draining if r.status is RequestStatus.PREEMPTED]
        places = Counter(map(id, [*waiting, *live.running, *preempted]))
        assert places == Counter(map(id, live)), "a request is in no queue or in two"
        assert set(live.connectors.loading) == {
            r.key for r in waiting if r.status is RequestStatus.LOADING
        }
        siblings = [request for group in completions.values() for request in group]
        assert Counter(map(id, siblings)) == Counter(map(id, live)), (
            "completions differ from the requests"
        )
        children = Counter(id(r.parent) for r in live if r.parent is not None)
        for request in self._seen.values():
            counted = request.num_waiting_children
            assert counted == children[id(request)], (
                f"{request}: {counted} waiting children, there are {children[id(request)]}"
            )
        for request in waiting:
            assert request.row is None and not request.num_in_flight_steps
            assert self._adapter_of(request) is None
            left = (
                request.draft_token_ids,
                request.num_in_flight_tokens,
                request.num_loading_tokens,
            )
            assert not any(left), (
                f"{request} waits with (drafts, tokens in flight, tokens that are loaded) {left}"
            )
            assert request.num_computed_tokens == 0 or self._kv.holds(request), (
                f"{request} waits and counts tokens without blocks"
            )

    def _check_rows(self) -> None:
        """Every row has one owner or is free, and the steps in flight are those that its owner
        counts."""
        rows = self._live.rows
        owners = {request for request in rows.owners if request is not None}
        assert owners == {*self._live.running, *rows._draining}, (
            "a request without a row runs, or a row is kept"
        )
        free = [row for row, request in enumerate(rows.owners) if request is None]
        assert sorted(rows._free) == free, f"free rows {rows._free}, without owner {free}"
        batches = [batch for batch, _ in self._engine._steps._in_flight]
        assert len(batches) <= self._limits.max_in_flight and set(self._scheduler._steps) == {
            batch.step for batch in batches
        }
        steps = Counter[int]()
        tokens = Counter[int]()
        for batch in batches:
            for row, count in zip(
                batch.rows.tolist(), batch.num_scheduled_tokens.tolist(), strict=True
            ):
                steps[row] += 1
                tokens[row] += count
        for row, request in enumerate(rows.owners):
            if request is None:
                continue
            counted = (
                request.row,
                request.num_in_flight_steps,
                request.num_in_flight_tokens - request.num_loading_tokens,
            )
            assert counted == (row, steps[row], tokens[row]), (
                f"{request}: (row, steps, tokens in flight) {counted}, really "
                f"{row, steps[row], tokens[row]}"
            )
            assert request.status is RequestStatus.RUNNING or request.num_in_flight_steps, (
                f"{request} drains, with no step in flight"
            )

    def _adapter_of(self, request: Request) -> Adapter | None:
        return None if self._loras is None else self._loras._held.get(request)

    def _check_adapters(self) -> None:
        """Every slot is free or has one adapter, and an adapter's users are the requests that have
        rows."""
        loras = self._loras
        if loras is None:
            return
        limits = self._limits
        owners = {request for request in self._live.rows.owners if request is not None}
        assert loras._held.keys() <= owners, "a request without a row holds an adapter"
        users = Counter(map(id, loras._held.values()))
        used = {id(adapter): adapter for adapter in loras._held.values()}
        adapters = {**{id(adapter): adapter for adapter in loras._adapters.values()}, **used}
        for key, adapter in adapters.items():
            assert adapter.num_users == users[key], f"{adapter}: its users are {users[key]}"
            assert adapter.is_stale == (adapter not in loras._adapters.values())
        slots = [adapter.slot for adapter in adapters.values() if adapter.slot is not None]
        assert sorted(slots + loras._free) == list(range(1, limits.max_loras + 1)), (
            f"slots {slots}, free {loras._free}"
        )
        assert len(loras._adapters) <= max(limits.max_loras, limits.max_cpu_loras), (
            "more adapters are in memory than allowed"
        )


def check_pool(pool: BlockPool) -> None:
    """Check that the pool's tables agree: free blocks have no references, both directions of the
    cache's names are the same, and blocks without a name are taken before cached ones."""
    free = list(pool._free)
    assert sorted(free) == [
        block for block in range(1, pool.num_blocks) if not pool._num_refs[block]
    ]
    assert min(pool._num_refs) >= 0 and pool._num_refs[NULL_BLOCK] == 0
    assert {key: block for block, key in pool._key_of.items()} == pool._block_of and len(
        pool._block_of
    ) == len(pool._key_of)
    is_cached = [block in pool._key_of for block in free]
    assert is_cached == sorted(is_cached), "a cached block is taken before an empty one"
