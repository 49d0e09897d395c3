"""A worker with a fake KV memory. It does everything that `pegboard.data.batch` describes, and
checks what the engine sends.

The memory is one pool of blocks shared by all KV groups. A step writes what it computes through the
block tables, and reads the history back only through them, so any error in block accounting (a
block given to two requests, freed too early, not copied, hashed wrongly) changes tokens. Order
inside a step, as in a real worker: connector saves, removed rows, new rows, new blocks, block
copies, connector loads, writes of all rows, then reads and sampling of all rows, drafts, connector
reports.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pegboard.data.batch import CSR, Batch, Logprobs, NewRequest, StepOutput, StepTimes, TokenMasks
from pegboard.data.request import LoRARequest
from pegboard.errors import ConfigError
from pegboard.interfaces.attention import Encoder, KVPlan, State
from pegboard.interfaces.draft import DraftProposer, DraftStep
from pegboard.interfaces.executor import ENGINE_CALLS, SERVING_CALLS, START_CALLS
from pegboard.interfaces.kv_connector import KVConnectorWorker
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard_testing.fake_model import FakeModel, cross_rows, media_tokens


@dataclass
class _Row:
    """The state of one row. scores: prompt positions scored so far. states: the folded state after
    each computed token of the step. is_taken_back: the last step had wrong drafts, and there are
    states."""

    request: NewRequest
    token_ids: list[int]
    tables: list[list[int]]
    num_computed: int
    proposals: list[int] = field(default_factory=list)
    scores: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    lora_id: int = 0
    is_taken_back: bool = False

    @cached_property
    def media(self) -> dict[int, tuple[str, int]]:
        """Position → the digest of the item whose row is there, and what stands for the row."""
        return {
            position: (item.digest, token)
            for item in self.request.media
            for position, token in media_tokens([item]).items()
        }

    @property
    def seed(self) -> int | None:
        return self.request.seed


def weights_of(name: str) -> int:
    """Return the weights of a `FakeModel` that were read from the folder with this name."""
    return zlib.crc32(name.encode())


class FakeWorker:
    """One rank. proposer: asked after every sampling step; the `target` of a FakeDraft may
    be `next_of_row`. ahead_rows: set if steps with drafts are scheduled ahead; no drafts for more
    rows than these. failing_step: the number of a step that raises, for tests of failures."""

    def __init__(
        self,
        model: FakeModel,
        plan: KVPlan,
        max_num_seqs: int,
        *,
        proposer: DraftProposer | None = None,
        max_drafts: int = 0,
        ahead_rows: int | None = None,
        connectors: Mapping[str, KVConnectorWorker] | None = None,
        failing_step: int | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.has_states = any(isinstance(retain, State) for retain in model.retains)
        self.proposer = proposer
        self.max_drafts = max_drafts
        self.ahead_rows = ahead_rows
        self.failing_step = failing_step
        self.connectors = dict(connectors or {})
        self.memory = np.full(
            (plan.num_blocks, max(group.block_size for group in plan.groups)), -1, np.int64
        )
        self.rows: list[_Row | None] = [None] * max_num_seqs
        self.adapters: dict[int, int] = {}  # slot → lora_id
        self.bad_adapters: set[str] = set()  # paths that cannot be read
        self.versions: dict[str, str] = {}  # path → which files are there
        self.slow_reads = 0  # how often a read is not done when the engine asks
        self.asked: dict[int, int] = {}  # ticket → how often the engine asked
        self.read: dict[int, int] = {}  # ticket → lora_id
        self.encoded: dict[str, int] = {}  # digest → rows that are kept
        self.encoder_limits = (0, 0)  # rows of a step, rows that are kept
        self.num_steps = 0
        self.num_tokens = 0
        views = {layer: {"kv": self.memory} for group in plan.groups for layer in group.layers}
        for connector in self.connectors.values():
            connector.register(views, plan.groups)

    # --- one step ---------------------------------------------------------------------------------

    def run(self, batch: Batch, masks: Callable[[], TokenMasks] | None) -> Callable[[], StepOutput]:
        """Compute a step, and return a callable that returns its result. `masks` is called after
        the forward of a batch that needs masks."""
        started = time.perf_counter()
        if batch.step == self.failing_step:
            raise RuntimeError("asked to fail")
        for name, connector in self.connectors.items():
            connector.save(batch.connector[name])
        self._encode(batch)
        self._update_rows(batch)
        for name, connector in self.connectors.items():
            connector.begin(batch.connector[name])
        given = [self._inputs(batch, i) for i in range(batch.num_rows)]
        for i in range(batch.num_rows):
            if batch.num_draft_tokens[i]:
                self._copy_states(self._row(batch, i), 0, 1)
            self._write(self._row(batch, i), given[i])
        allowed = self._allowed(masks()) if batch.needs_masks and masks is not None else {}
        output = self._read_all(batch, given, allowed)
        if self.proposer is not None:
            output.draft_token_ids = self._propose(batch, output)
            if self.ahead_rows is not None and not batch.needs_masks:
                output.draft_token_ids = None  # the engine does not need to know them
        output.transfers = {name: connector.end() for name, connector in self.connectors.items()}
        output.times = StepTimes(forward_s=time.perf_counter() - started)
        self.num_steps += 1
        self.num_tokens += batch.num_tokens
        return lambda: output

    def call(self, method: str, *args: object) -> object:
        """Read or load an adapter, or take other weights. Others do nothing. Refuses the methods
        that a real worker refuses."""
        if method not in START_CALLS | SERVING_CALLS | ENGINE_CALLS:
            raise ConfigError(f"workers have no method {method!r}")
        methods = {
            "read_adapter": self._read_adapter,
            "load_adapter": self._load_adapter,
            "drop_adapters": self._drop_adapters,
            "update_weights": self._update_weights,
        }
        return methods[method](*args) if method in methods else None  # type: ignore[operator]

    def _update_weights(self, checkpoint: Checkpoint | None) -> None:
        assert checkpoint is not None, "no update has failed"
        self.model.weights = weights_of(checkpoint.path.name)

    def _read_adapter(self, ticket: int, adapter: LoRARequest) -> tuple[str, str] | None:
        asked = self.asked[ticket] = self.asked.get(ticket, 0) + 1
        if asked <= self.slow_reads:
            return None
        if adapter.lora_path in self.bad_adapters:
            return "", f"{adapter.lora_path} is missing"
        self.read[ticket] = adapter.lora_int_id
        return (
            f"{adapter.lora_path} {adapter.lora_int_id} {self.versions.get(adapter.lora_path, '')}",
            "",
        )

    def _load_adapter(self, slot: int, ticket: int) -> None:
        self.adapters[slot] = self.read[ticket]

    def _drop_adapters(self, tickets: list[int]) -> None:
        for ticket in tickets:
            self.asked.pop(ticket, None)
            self.read.pop(ticket, None)

    def _row(self, batch: Batch, i: int) -> _Row:
        row = self.rows[int(batch.rows[i])]
        assert row is not None, f"row {batch.rows[i]} is scheduled but empty"
        return row

    # --- before the forward -----------------------------------------------------------------------

    def _encode(self, batch: Batch) -> None:
        for digest in batch.forgotten:
            assert digest in self.encoded, "an item is dropped that is not there"
            del self.encoded[digest]
        for item in batch.encode:
            assert item.digest not in self.encoded, "an item is encoded twice"
            self.encoded[item.digest] = item.num_rows
        of_step, kept = self.encoder_limits
        num_rows = sum(item.num_rows for item in batch.encode)
        assert num_rows <= of_step or len(batch.encode) == 1, "a step encodes too many rows"
        num_rows = sum(self.encoded.values())
        assert num_rows <= kept or len(self.encoded) == 1, "too many rows are kept"

    def _update_rows(self, batch: Batch) -> None:
        for row in batch.removed_rows.tolist():
            assert self.rows[row] is not None, f"row {row} is removed but empty"
            self.rows[row] = None
        for new in batch.new:
            assert self.rows[new.row] is None, f"row {new.row} is given out twice"
            self.rows[new.row] = _Row(
                new,
                new.token_ids.tolist(),
                [t.tolist() for t in new.block_ids],
                new.num_computed_tokens,
            )
        delta = batch.new_blocks
        for row, group, block_ids in zip(
            delta.rows.tolist(), delta.groups.tolist(), delta.block_ids.lists(), strict=True
        ):
            owner = self.rows[row]
            assert owner is not None and block_ids
            owner.tables[group].extend(block_ids)
        for new in batch.new if any(isinstance(r, Encoder) for r in self.model.retains) else ():
            self._store_encoded(new)
        if self.proposer is not None:
            self.proposer.remove(batch.removed_rows)
            for new in batch.new:
                self.proposer.add(new.row, new.token_ids)
        sources = batch.copy_blocks[:, 1]
        destinations = batch.copy_blocks[:, 2]
        assert not set(sources.tolist()) & set(destinations.tolist()), (
            "copies of one step must not depend on each other"
        )
        self.memory[destinations] = self.memory[sources]
        if batch.lora_slots is not None:
            for i, slot in enumerate(batch.lora_slots.tolist()):
                self._row(batch, i).lora_id = self.adapters[slot] if slot else 0

    def _store_encoded(self, new: NewRequest) -> None:
        """Store what the encoder makes, at the begin of a request."""
        if new.num_computed_tokens:
            return
        (item,) = new.media
        assert item.digest in self.encoded, "the request needs an item that is not encoded"
        row = self.rows[new.row]
        assert row is not None
        values = np.array(cross_rows(new.media), np.int64)
        for group, retain in enumerate(self.model.retains):
            if isinstance(retain, Encoder):
                self._store(row, group, np.arange(len(values)), values)

    def _inputs(self, batch: Batch, i: int) -> list[int]:
        """Return the tokens of this step, drafts last. Check that the engine and the row agree on
        the number of computed tokens."""
        row = self._row(batch, i)
        num_drafts = int(batch.num_draft_tokens[i])
        num_known = int(batch.num_scheduled_tokens[i]) - num_drafts
        num_wrong = int(batch.num_computed_tokens[i]) - row.num_computed
        assert num_wrong == 0 or (
            self.ahead_rows is not None and num_known == 1 and num_wrong > 0
        ), "the engine is wrong about num_computed_tokens"
        if num_wrong:  # there are slots even if all drafts are right
            stop = row.num_computed + num_wrong + 1 + num_drafts
            for group, retain in enumerate(self.model.retains):
                if not isinstance(retain, Encoder):
                    self._slots(row, group, np.arange(row.num_computed, stop))
        known = row.token_ids[row.num_computed : row.num_computed + num_known]
        assert len(known) == num_known >= 1, "more tokens are scheduled than the row has"
        assert bool(batch.samples[i]) == (row.num_computed + num_known == len(row.token_ids))
        if batch.first_token_ids is not None:
            assert int(batch.first_token_ids[i]) == known[0], "the first stage gets a wrong token"
            assert not num_drafts or batch.draft_token_ids is not None
        drafts = (
            batch.draft_token_ids.row(i).tolist()
            if batch.draft_token_ids is not None
            else row.proposals[:num_drafts]
        )
        assert len(drafts) == num_drafts and (not num_drafts or batch.samples[i])
        return known + drafts

    # --- the forward ------------------------------------------------------------------------------

    def _write(self, row: _Row, tokens: list[int]) -> None:
        stop = row.num_computed + len(tokens)
        assert not any(first < stop < end for first, end in row.request.whole), "it is not whole"
        positions = np.arange(row.num_computed, stop)
        if row.media:
            tokens = [self._token(row, p, t) for p, t in enumerate(tokens, row.num_computed)]
        pairs = zip(tokens, positions.tolist(), strict=True)
        values = np.array(
            [self.model.value(token, position, row.lora_id) for token, position in pairs], np.int64
        )
        for group, retain in enumerate(self.model.retains):
            if isinstance(retain, State):
                state = int(self.memory[row.tables[group][0], 0]) if row.num_computed else 0
                row.states = []
                for value in values.tolist():
                    state = self.model.fold(state, value)
                    row.states.append(state)
            elif not isinstance(retain, Encoder):
                self._store(row, group, positions, values)

    def _token(self, row: _Row, position: int, token: int) -> int:
        if position not in row.media:
            return token
        digest, instead = row.media[position]
        assert digest in self.encoded, f"position {position} needs an item that is not encoded"
        return instead

    def _slots(self, row: _Row, group: int, positions: np.ndarray) -> np.ndarray:
        size = self.plan.groups[group].block_size
        block_ids = np.array(row.tables[group], np.int64)[positions // size]
        assert (block_ids > 0).all(), (
            f"{row.request.request_id}: a dropped block is used in group {group}"
        )
        return np.stack([block_ids, positions % size])

    def _store(self, row: _Row, group: int, positions: np.ndarray, values: np.ndarray) -> None:
        self.memory[tuple(self._slots(row, group, positions))] = values

    def _next(self, row: _Row, position: int, allowed: list[int] | None) -> int:
        """Read the values that the token after `position` may see, and choose the token."""
        views: list[np.ndarray | list[int]] = []
        for group, retain in enumerate(self.model.retains):
            if isinstance(retain, State):
                views.append([row.states[position - row.num_computed]])
                continue
            seen = self.model.seen(retain, position)
            if isinstance(retain, Encoder):
                seen = np.arange(len(cross_rows(row.request.media)))
            views.append(self.memory[tuple(self._slots(row, group, seen))])
        return self.model.choose(views, position, row.seed, allowed)

    # --- after the forward ------------------------------------------------------------------------

    def _allowed(self, masks: TokenMasks) -> dict[tuple[int, int], list[int]]:
        bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")[
            :, : self.model.vocab_size
        ]
        keys = zip(masks.rows.tolist(), masks.depths.tolist(), strict=True)
        return {key: np.flatnonzero(bits[i]).tolist() for i, key in enumerate(keys)}

    def _read_all(
        self, batch: Batch, given: list[list[int]], allowed: dict[tuple[int, int], list[int]]
    ) -> StepOutput:
        rows = []
        tokens = []
        logprobs = []
        prompt_logprobs: dict[int, Logprobs] = {}
        for i, number in enumerate(batch.rows.tolist()):
            row = self._row(batch, i)
            inputs = given[i]
            self._score_prompt(row, len(inputs))
            params = row.request.params
            if batch.samples[i]:
                sampled = self._verify(row, number, inputs, int(batch.num_draft_tokens[i]), allowed)
                rows.append(number)
                tokens.append(sampled)
                wanted = params.logprobs
                logprobs.append(
                    None
                    if wanted is None
                    else fake_logprobs(sampled, wanted, self.model.vocab_size)
                )
                if params.prompt_logprobs is not None and row.scores:
                    assert len(row.scores) == row.request.num_prompt_tokens - 1, (
                        "a prompt position was never computed"
                    )
                    prompt_logprobs[number] = fake_logprobs(
                        row.scores, params.prompt_logprobs, self.model.vocab_size
                    )
                    row.scores = []
                num_accepted = len(inputs) - int(batch.num_draft_tokens[i]) + len(sampled) - 1
                row.is_taken_back = num_accepted < len(inputs) and self.has_states
            else:
                sampled = []
                num_accepted = len(inputs)
                row.is_taken_back = False
            self._advance(row, num_accepted, sampled)
        return StepOutput(
            step=batch.step,
            rows=np.array(rows, np.int32),
            token_ids=CSR.of(tokens),
            logprobs=logprobs if any(entry is not None for entry in logprobs) else None,
            prompt_logprobs=prompt_logprobs,
        )

    def _score_prompt(self, row: _Row, num_tokens: int) -> None:
        """Score the prompt tokens whose predecessor is computed in this step."""
        params = row.request.params
        if params.prompt_logprobs is not None:
            stop = min(row.num_computed + num_tokens + 1, row.request.num_prompt_tokens)
            row.scores.extend(row.token_ids[row.num_computed + 1 : stop])

    def _verify(
        self,
        row: _Row,
        number: int,
        inputs: list[int],
        num_drafts: int,
        allowed: dict[tuple[int, int], list[int]],
    ) -> list[int]:
        """Return the accepted drafts and one more token."""
        last = row.num_computed + len(inputs) - num_drafts - 1
        sampled = []
        for depth in range(num_drafts + 1):
            token = self._next(row, last + depth, allowed.get((number, depth)))
            sampled.append(token)
            if depth < num_drafts and inputs[len(inputs) - num_drafts + depth] != token:
                break
        return sampled

    def _advance(self, row: _Row, num_accepted: int, sampled: list[int]) -> None:
        """After wrong drafts, the tokens of the step are computed again if there are states."""
        if row.is_taken_back:
            self._copy_states(row, 1, 0)
        else:
            for group, retain in enumerate(self.model.retains):
                if isinstance(retain, State):
                    self.memory[row.tables[group][0], 0] = row.states[num_accepted - 1]
            row.num_computed += num_accepted
        row.token_ids.extend(sampled)
        row.proposals = []

    def _copy_states(self, row: _Row, source: int, destination: int) -> None:
        for group, retain in enumerate(self.model.retains):
            if isinstance(retain, State):
                table = row.tables[group]
                self.memory[table[destination]] = self.memory[table[source]]

    def _propose(self, batch: Batch, output: StepOutput) -> CSR:
        assert self.proposer is not None
        rows = [self.rows[number] for number in output.rows.tolist()]
        history = [np.array(row.token_ids, np.int32) for row in rows if row is not None]
        most = self.max_drafts
        if self.ahead_rows is not None and len(rows) > self.ahead_rows:
            most = 0
        allowed = [0 if row.is_taken_back else most for row in rows if row is not None]
        step = DraftStep(
            rows=output.rows,
            history=history,
            max_drafts=np.array(allowed, np.int32),
            num_verified=batch.num_draft_tokens[batch.samples],
            num_new=np.diff(output.token_ids.offsets),
        )
        proposals = [ids.tolist() for ids in self.proposer.propose(step).token_ids]
        for row, ids in zip(rows, proposals, strict=True):
            assert row is not None
            if self.ahead_rows is not None:  # as many as were promised
                ids += [0] * (most - len(ids))
            row.proposals = ids
        return CSR.of(proposals)

    def next_of_row(self, number: int, token_ids: list[int]) -> int:
        """Return the token that really follows `token_ids` in this row, so that a fake draft can be
        right as often as it wants."""
        row = self.rows[number]
        assert row is not None
        return self.model.next_token(token_ids, seed=row.seed, lora_id=row.lora_id)


def fake_logprobs(token_ids: list[int], k: int, vocab_size: int) -> Logprobs:
    """Return k alternatives for each token. Their values decrease with the rank."""
    k = vocab_size if k == -1 else k
    columns = [[token] + [(token + i) % vocab_size for i in range(k)] for token in token_ids]
    values = [[-0.5 - i for i in range(k + 1)] for _ in token_ids]
    return Logprobs(
        np.array(columns, np.int32), np.array(values, np.float32), np.ones(len(token_ids), np.int32)
    )
