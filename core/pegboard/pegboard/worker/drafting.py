"""How a step ends with speculative decoding: with tokens, and with proposals for the next step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pegboard.config.limits import Limits
from pegboard.data.batch import CSR, NewRequest, StepOutput
from pegboard.errors import expect
from pegboard.interfaces.draft import ComputedTokens, DraftProposer, Drafts, DraftStep
from pegboard.interfaces.platform import Copies
from pegboard.interfaces.sampler import Sampler
from pegboard.worker.endings import SampleOnHost, Step
from pegboard.worker.stages import Stages
from pegboard.worker.step_inputs import InputBuilder


class SampleAndDraft(SampleOnHost):
    """Also asks a draft plugin for the next step's drafts, after steps that have sampled.
    recomputes: after a wrong draft, the next step computes the tokens again, without drafts."""

    def __init__(
        self,
        sampler: Sampler,
        stages: Stages,
        inputs: InputBuilder,
        copies: Copies | None,
        proposer: DraftProposer,
        limits: Limits,
        recomputes: bool,
    ) -> None:
        super().__init__(sampler, stages, inputs, copies)
        self.recomputes = recomputes
        self.proposer = proposer
        self.limits = limits
        self._longest = min(limits.max_model_len - 1, limits.max_draft_len)
        self._most = np.zeros(limits.max_num_seqs, np.int64)  # drafts that each request allows
        self._zeros = np.zeros(limits.max_num_seqs + 1, np.int32)
        self._ones = np.ones(limits.max_num_seqs, np.int32)

    def add(self, new: NewRequest) -> None:
        super().add(new)
        self.proposer.add(new.row, new.token_ids)
        allowed = new.params.most_drafts
        most = self.limits.max_drafts
        self._most[new.row] = most if allowed is None else min(allowed, most)

    def remove(self, rows: np.ndarray) -> None:
        super().remove(rows)
        self.proposer.remove(rows)

    def end(self, step: Step) -> Callable[[], StepOutput]:
        wait = super().end(step)
        started = time.perf_counter()
        if len(step.inputs.sample_rows):
            step.output.draft_token_ids = self.propose(step, started)
        self.draft_s = time.perf_counter() - started
        return wait

    def propose(self, step: Step, now: float, computed: ComputedTokens | None = None) -> CSR:
        """Ask the draft plugin for the next step's proposals, and keep them."""
        inputs = step.inputs
        sampled = step.output.token_ids
        state = self.inputs.state
        rows = inputs.sample_rows
        num_rows = len(rows)
        lengths = state.num_tokens[rows]
        most = np.minimum(self._most[rows], np.maximum(self._longest - lengths, 0))
        if num_rows > self.limits.max_draft_rows:
            most[:] = 0
        num_verified = self._zeros[:num_rows]
        num_new = self._ones[:num_rows]
        if inputs.draft_token_ids is not None:
            num_verified = np.diff(inputs.offsets) - 1
            num_new = np.diff(sampled.offsets)
            if self.recomputes:
                most[num_new <= num_verified] = 0
        history = zip(rows.tolist(), lengths.tolist(), strict=True)
        request = DraftStep(
            rows=rows,
            history=[state.token_ids[row, :length] for row, length in history],
            max_drafts=most,
            num_verified=num_verified,
            num_new=num_new,
            num_tokens=inputs.num_tokens,
            seconds=now - step.started,
            computed=computed,
        )
        drafts = expect(self.proposer.propose(request), Drafts, self.proposer, "propose")
        state.proposals.keep(rows, drafts.token_ids, drafts.probs)
        if not any(map(len, drafts.token_ids)):
            return CSR(self._zeros[:0], self._zeros[: num_rows + 1])
        return CSR.of(drafts.token_ids)


class SampleAndFollow(SampleAndDraft):
    """Asks a draft plugin with a model, which computes all tokens that the target computes."""

    def end(self, step: Step) -> Callable[[], StepOutput]:
        num_tokens = step.inputs.num_tokens
        # a copy, because the logits may be a recording, which overwrites what others returned
        hidden = self.stages.taps or (step.hidden[:num_tokens].clone(),)
        wait = SampleOnHost.end(self, step)
        started = time.perf_counter()
        # the embedding and the head that a draft model shares are those of the base model
        self.inputs.has_adapters = False
        output = step.output
        computed = self.computed(step, output.token_ids, hidden)
        proposals = self.propose(step, started, computed)
        if len(step.inputs.sample_rows):
            output.draft_token_ids = proposals
        self.draft_s = time.perf_counter() - started
        return wait

    def computed(self, step: Step, sampled: CSR, hidden: Sequence[Tensor]) -> ComputedTokens:
        """Return the tokens of the step that stay."""
        batch = step.batch
        starts = step.inputs.query_start_loc[:-1]
        counts = batch.num_scheduled_tokens.astype(np.int64)
        if step.inputs.draft_token_ids is not None:
            counts[batch.samples] -= np.diff(step.inputs.offsets) - np.diff(sampled.offsets)
            ends = np.cumsum(counts)
            places = np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
            index = torch.from_numpy(places).to(hidden[0].device)
            hidden = [states[index] for states in hidden]
        return ComputedTokens(batch.rows, step.inputs.starts, counts, batch.samples, tuple(hidden))
