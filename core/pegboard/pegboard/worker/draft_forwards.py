"""The forwards of a draft model, in the rows and the blocks of the target's requests."""

from __future__ import annotations

import copy
from dataclasses import replace

import msgspec
import numpy as np
from torch import Tensor

from pegboard.config.limits import Limits
from pegboard.interfaces.attention import Full, KVPlan
from pegboard.interfaces.draft import DraftSource
from pegboard.interfaces.platform import Copies
from pegboard.layers.shards import Group
from pegboard.worker.attention_groups import EXACT_TYPES
from pegboard.worker.exact_rows import Mover
from pegboard.worker.loaded_model import LoadedModel
from pegboard.worker.parts import WorkerSetup
from pegboard.worker.recordings import Recorded
from pegboard.worker.stages import TRAITS
from pegboard.worker.step_inputs import NOT_PADDED, InputBuilder, RowState, StepInputs


def draft_limits(limits: Limits) -> Limits:
    """Return the limits of the draft model's steps. A step has the tokens of the target's, and one
    more in each row."""
    most = limits.max_num_batched_tokens + limits.max_num_seqs
    return replace(limits, max_num_batched_tokens=most)


def load_draft(setup: WorkerSetup, source: DraftSource, target: LoadedModel) -> LoadedModel:
    """Build the draft model without weights. Its layers come after the target's in the KV cache."""
    ranks = setup.ranks
    config = setup.config
    if config.spec_tensor_parallel_size == 1:
        ranks = replace(ranks, tensor=Group())
    stored = {*target.attention.stored.values()}
    if config.kv_cache_dtype == "auto" and len(stored) == 1 and stored <= EXACT_TYPES:
        # layers that store the same can share a KV group
        config = msgspec.structs.replace(config, kv_cache_dtype=stored.pop())
    return LoadedModel(
        replace(setup, limits=draft_limits(setup.limits), ranks=ranks, config=config),
        source.checkpoint,
        first_layer=target.end_layer(),
        quantization=setup.config.spec_quantization,
        target=target.model,
    )


class DraftForwards:
    """Implements `pegboard.interfaces.draft.Forwards`. state: of the target's rows."""

    def __init__(
        self,
        loaded: LoadedModel,
        plan: KVPlan,
        state: RowState,
        limits: Limits,
        copies: Copies | None,
    ) -> None:
        self.model = loaded.model
        self._loaded = loaded
        self._last_id = limits.vocab_size - 1
        self._last_position = min(limits.max_draft_len, limits.max_model_len) - 1
        # the same tokens and block tables, without what only the target's model declares
        state = copy.copy(state)
        state.declared = {}
        state.visible = None
        self._state = state
        layers = loaded.kv_specs()
        self._groups = [
            index for index, group in enumerate(plan.groups) if layers.keys() & {*group.layers}
        ]
        retains = [plan.groups[index].spec.retain for index in self._groups]
        self.can_wait = all(isinstance(retain, Full) for retain in retains)
        self._sizes = [plan.groups[index].block_size for index in self._groups]
        self._inputs = InputBuilder(
            plan,
            max_tokens=draft_limits(limits).max_num_batched_tokens,
            max_rows=limits.max_num_seqs,
            state=state,
            device=loaded.setup.device.name,
            context=loaded.setup.ranks.context,
            copies=copies,
        )
        self._mover = Mover(self._inputs, self._last_position)
        # a model without layers has only heads
        self._stages = loaded.connect(self._inputs, TRAITS if layers else ("logits",))
        self._step: tuple[int, Recorded | None, StepInputs] | None = None
        self._ids = self._inputs.to_embed[0].on_device

    def room(self, rows: np.ndarray) -> np.ndarray:
        """See `Forwards.room`."""
        state = self._state
        tokens = [
            state.num_blocks[index][rows] * size
            for index, size in zip(self._groups, self._sizes, strict=True)
        ]
        return np.minimum.reduce(tokens)

    def tokens(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        hidden: Tensor | None = None,
        *,
        ahead: int = 0,
        exact: Tensor | None = None,
        ids: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `Forwards.tokens`."""
        recorded = self._stages.recordings.find("forward", int(counts.sum()))
        inputs = self._begin(rows, starts, counts, recorded, hidden, ahead=ahead, exact=exact)
        if ids is not None:
            self._ids.index_copy_(0, *ids)
        return self._stages.forward(recorded, inputs)

    def next(
        self,
        rows: np.ndarray,
        positions: np.ndarray,
        token_ids: Tensor,
        hidden: Tensor | None = None,
        *,
        exact: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Forwards.next`."""
        num_rows = len(rows)
        recorded = self._stages.recordings.find("decode", num_rows)
        ones = self._inputs.one_each[1:2].repeat(num_rows)
        inputs = self._begin(rows, positions, ones, recorded, hidden, exact=exact)
        self._step = num_rows, recorded, inputs
        return self._compute_next(token_ids)

    def after(self, token_ids: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Forwards.after`."""
        self._mover.advance(len(token_ids))
        self._give(hidden, len(token_ids))
        return self._compute_next(token_ids)

    def _compute_next(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        assert self._step is not None, "`next` has set it"
        num_rows, recorded, inputs = self._step
        self._ids[:num_rows].copy_(token_ids)
        if recorded is not None:
            return self._stages.decode(recorded, num_rows)
        states = self._stages.forward(None, inputs)
        return states, self._stages.logits(states)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Forwards.logits`."""
        return self._stages.logits(hidden)

    def _begin(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        recorded: Recorded | None,
        hidden: Tensor | None,
        *,
        ahead: int = 0,
        exact: Tensor | None = None,
    ) -> StepInputs:
        """Fill the buffers, and give the step to the attention backends."""
        builder = self._inputs
        if builder.copies is not None:
            builder.take_turns(builder.copies)
        token_rows, _ = builder.fill(rows, counts, starts, ahead=ahead)
        num_tokens = len(token_rows)
        ids = builder.input_ids.array[:num_tokens]
        np.minimum(ids, self._last_id, out=ids)  # placeholders of items may be larger
        if exact is None:
            positions = builder.positions.array[:num_tokens]
            # no drafts come from what is computed after the draft model's limit
            np.minimum(positions, self._last_position, out=positions)
        padded = NOT_PADDED if recorded is None else recorded.padded
        inputs = builder.send(len(rows), num_tokens, padded)
        if exact is not None:
            self._mover.move(counts, exact)
        self._give(hidden, num_tokens)
        self._loaded.plan(inputs)
        return inputs

    def _give(self, hidden: Tensor | None, num_tokens: int) -> None:
        """Put what the model is given with each token where it reads it."""
        if hidden is not None:
            assert self._loaded.given is not None, "the model has declared what it is given"
            self._loaded.given[:num_tokens].copy_(hidden)
