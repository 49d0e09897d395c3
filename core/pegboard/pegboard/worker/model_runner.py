"""One rank's step: batch → forward → token ids. A runner owns the persistent buffers and the
per-row state."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from pegboard.data.batch import (
    CSR,
    Batch,
    NewRequest,
    StepOutput,
    StepTimes,
    TransferReport,
)
from pegboard.errors import expect
from pegboard.worker.buffers import sent_once
from pegboard.worker.endings import Masks, Step
from pegboard.worker.exact_rows import ExactRows
from pegboard.worker.given_rows import GivenRows
from pegboard.worker.kept_states import KeptStates
from pegboard.worker.memory import copy_blocks
from pegboard.worker.prompt_logprobs import PromptScores
from pegboard.worker.runner_parts import RunnerParts, make_ending
from pegboard.worker.step_inputs import NOT_PADDED, InputBuilder, RowState


class ModelRunner:
    """Runs the steps of one rank. `run` is a whole step."""

    def __init__(self, parts: RunnerParts) -> None:
        self.parts = parts
        limits = parts.limits
        declared = parts.loaded.build.declared
        self.state = RowState(
            limits.max_num_seqs,
            limits.max_model_len + limits.max_drafts + 1,
            parts.plan,
            (*declared.inputs, *declared.axes),
            sees_items=any(layer.sees_items for layer in declared.attention.values()),
        )
        self.inputs = InputBuilder(
            parts.plan,
            max_tokens=limits.max_num_batched_tokens,
            max_rows=limits.max_num_seqs,
            state=self.state,
            device=parts.device,
            context=parts.loaded.setup.ranks.context,
            copies=parts.copies,
            max_loras=limits.max_loras,
            axes=declared.axes,
            item_groups=parts.loaded.item_groups(parts.plan),
        )
        self.exact = (
            ExactRows(self.inputs, limits.max_num_seqs, limits.max_drafts)
            if parts.drafts_ahead
            else None
        )
        self.stages = parts.loaded.connect(self.inputs, parts.traits, limits.max_drafts)
        tensor = parts.loaded.setup.ranks.tensor
        self.given = GivenRows(parts.device, parts.loaded.model, tensor, parts.shared_rows)
        self.scores = PromptScores(
            parts.sampler, parts.loaded.model.logits, self.state, self.inputs.head_adapters
        )
        self.kept = KeptStates(parts.plan, parts.views, self.state, parts.device, parts.copies)
        recomputes = bool(self.kept)
        self.ending = make_ending(parts, self.stages, self.inputs, self.exact, recomputes)

    @torch.inference_mode()
    def embedding_size(self) -> int:
        """Return the width of the rows that the model's `embed` returns."""
        return self.stages.entrance.one().shape[1]

    def kept_rows_bytes(self) -> int:
        """Return the most bytes that the rows of images, audio and video take while they are kept,
        in float32."""
        limits = self.parts.limits
        most = max(limits.max_num_encoder_input_tokens, limits.encoder_cache_size)
        has_items = limits.max_num_encoder_input_tokens and self.stages.build.stage.is_first
        return 4 * self.embedding_size() * most if has_items else 0

    @torch.inference_mode()
    def run(self, batch: Batch, masks: Masks | None = None) -> Callable[[], StepOutput]:
        """Compute `batch`. The returned callable waits for the result, if the device has not
        finished. masks() waits for the grammar masks of a batch that needs them."""
        started = time.perf_counter()
        for name, connector in self.parts.connectors.items():
            connector.save(batch.connector.get(name, b""))
        transfer_s = time.perf_counter() - started
        self._apply(batch)
        transfer_s += self._begin_transfers(batch)
        if batch.num_rows == 0:
            output = self._empty(batch)
            return lambda: output
        num_tokens = int(batch.num_scheduled_tokens.sum())
        self.inputs.has_adapters = batch.lora_slots is not None and bool(batch.lora_slots.any())
        has_given = bool(self.given.spans) and self.given.computed(batch)
        needs_all = bool((batch.num_scheduled_tokens == batch.num_draft_tokens + 1).all())
        is_decode = needs_all and not has_given and bool(batch.samples.all())
        fused = self.stages.recordings.find_whole(batch.num_rows, num_tokens) if is_decode else None
        recorded = fused or self.stages.recordings.find("forward", num_tokens)
        padded = NOT_PADDED if recorded is None else recorded.padded
        sees_ahead = self.state.visible is not None and self.state.visible.matters(batch)
        if sees_ahead and padded != NOT_PADDED:
            recorded = None  # recordings attend causally
            padded = NOT_PADDED
        inputs = self.inputs.build(batch, padded, sees_ahead=sees_ahead)
        if self.exact is not None:
            self.exact.apply(batch, inputs)
        if self.kept:
            self.kept.begin(batch)
        prepared = time.perf_counter()
        self.parts.loaded.plan(inputs)
        planned = time.perf_counter()
        logits = None
        if fused is not None:
            hidden, logits = self.stages.decode(fused, num_tokens)
        else:
            given = self.given.collect(batch, inputs) if has_given else None
            hidden = self.stages.forward(recorded, inputs, given)
        computed = time.perf_counter()
        transfers = self._end_transfers()
        forwarded = time.perf_counter()
        prompt_logprobs = self.scores.collect(batch, inputs, hidden) if self.scores.wanted else {}
        output = StepOutput(
            step=batch.step,
            rows=inputs.sample_rows,
            token_ids=CSR.empty(),
            prompt_logprobs=prompt_logprobs,
            transfers=transfers,
        )
        wait = self.ending.end(Step(batch, inputs, hidden, logits, masks, output, started))
        draft_s = self.ending.draft_s
        ended = time.perf_counter()
        output.times = StepTimes(
            prepare_s=prepared - started - transfer_s,
            forward_s=computed - prepared,
            sample_s=ended - forwarded - draft_s,
            draft_s=draft_s,
            plan_s=planned - prepared,
            transfer_s=transfer_s + forwarded - computed,
        )
        return wait

    def _begin_transfers(self, batch: Batch) -> float:
        """Tell the connectors what this step loads. Returns the seconds that this took."""
        started = time.perf_counter()
        for name, connector in self.parts.connectors.items():
            connector.begin(batch.connector.get(name, b""))
        return time.perf_counter() - started

    def _end_transfers(self) -> dict[str, TransferReport]:
        connectors = self.parts.connectors.items()
        return {
            name: expect(connector.end(), TransferReport, connector, "end")
            for name, connector in connectors
        }

    def _apply(self, batch: Batch) -> None:
        """Update the per-row state: removed rows, added rows, new blocks and copies."""
        if len(batch.removed_rows):
            self._remove(batch.removed_rows)
        for new in batch.new:
            self._add(new)
        if batch.first_token_ids is not None and self.parts.next_stage is not None:
            self.state.learn(batch.rows, batch.num_computed_tokens, batch.first_token_ids)
        if (batch.encode or batch.forgotten) and self.stages.build.stage.is_first:
            self.given.encode(batch)
        self.state.append_blocks(batch)
        if len(batch.copy_blocks):
            self._copy_blocks(batch.copy_blocks)
        for new in batch.new if self.inputs.cross else ():
            self._store_encoded(new)

    def _remove(self, rows: np.ndarray) -> None:
        self.state.proposals.remove(rows)
        if self.given.spans:
            self.given.remove(rows)
        self.ending.remove(rows)
        for row in rows.tolist() if self.scores.wanted else ():
            self.scores.remove(row)

    def _add(self, new: NewRequest) -> None:
        self.state.add(new)
        self.kept.add(new.row)
        stage = self.stages.build.stage
        if (new.params.prompt_logprobs is not None or self.scores.wanted) and stage.is_last:
            self.scores.add(new)
        if (new.prompt_embeds or new.media) and stage.is_first:
            self.given.add(new)
        self.ending.add(new)

    def _store_encoded(self, new: NewRequest) -> None:
        """Store what cross attention reads, at the begin of a request."""
        if new.num_computed_tokens:
            return  # it shares the blocks of another completion
        steps = {
            i: each.storing(new.row, self.parts.device) for i, each in self.inputs.cross.items()
        }
        for item in new.media:
            self.parts.loaded.store_encoded(self.given.encoded[item.digest], steps)

    def _copy_blocks(self, copies: np.ndarray) -> None:
        for index, group in enumerate(self.parts.plan.groups):
            pairs = copies[copies[:, 0] == index]
            if len(pairs):
                columns = pairs[:, 1:].T.astype(np.int64, order="C")
                source, destination = sent_once(columns, self.parts.device, self.parts.copies)
                copy_blocks(self.parts.views, group, source, destination)

    def _empty(self, batch: Batch) -> StepOutput:
        """Return the result of a step without tokens. Such a step still runs transfers."""
        transfers = self._end_transfers()
        none = np.zeros(0, np.int32)
        return StepOutput(step=batch.step, rows=none, token_ids=CSR.empty(), transfers=transfers)
