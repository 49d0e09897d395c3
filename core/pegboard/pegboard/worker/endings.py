"""How a step ends: with vectors, with tokens on the host or on the device, or in the next pipeline
stage. A runner is built with one of these endings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pegboard.config.limits import Limits
from pegboard.data.batch import BAD_LOGITS, CSR, Batch, NewRequest, StepOutput, TokenMasks
from pegboard.data.pooling_params import PoolingParams
from pegboard.errors import expect
from pegboard.interfaces.draft import ComputedTokens, DraftProposer, Drafts, DraftStep
from pegboard.interfaces.platform import Copies
from pegboard.interfaces.pooler import Pooler, PoolStep
from pegboard.interfaces.sampler import Sampled, Sampler, SampleStep
from pegboard.worker.borders import Sender
from pegboard.worker.stages import Stages
from pegboard.worker.step_inputs import InputBuilder, StepInputs

Masks = Callable[[], TokenMasks]


@dataclass(slots=True)
class Step:
    """What an ending gets. hidden: [T, size]. logits: [S, V] if the step has computed them already.
    masks: waits for the grammar masks; None = the step needs none. output: gets the results."""

    batch: Batch
    inputs: StepInputs
    hidden: Tensor
    logits: Tensor | None
    masks: Masks | None
    output: StepOutput


class Ending:
    """draft_s: seconds that the last step took to propose drafts."""

    draft_s = 0.0

    def add(self, new: NewRequest) -> None:
        """A request starts or resumes in a row."""

    def remove(self, rows: np.ndarray) -> None:
        """Requests have left these rows."""

    def end(self, step: Step) -> Callable[[], StepOutput]:
        """Turn the hidden states into `step.output`. The returned callable waits for it."""
        return lambda: step.output


class Pool(Ending):
    """Makes vectors of prompts."""

    def __init__(self, pooler: Pooler, stages: Stages) -> None:
        self.pooler = pooler
        self.stages = stages
        self.params: dict[int, PoolingParams] = {}

    def add(self, new: NewRequest) -> None:
        self.params[new.row] = new.pooling or PoolingParams()

    def end(self, step: Step) -> Callable[[], StepOutput]:
        inputs = step.inputs
        if rows := inputs.sample_rows.tolist():
            pool_step = PoolStep(
                starts=inputs.query_start_loc[: len(rows) + 1],
                last=inputs.logits_index,
                params=[self.params[row] for row in rows],
                classify=self.stages.logits,
            )
            vectors = self.pooler.pool(step.hidden[: inputs.num_tokens], pool_step)
            step.output.embeddings = expect(vectors, list, self.pooler, "pool")
        return lambda: step.output


class Send(Ending):
    """Sends the rows to the next pipeline stage."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender

    def end(self, step: Step) -> Callable[[], StepOutput]:
        self.sender.send(step.hidden[: step.inputs.num_tokens])
        return lambda: step.output


class SampleOnHost(Ending):
    """The host waits for the tokens, because drafts depend on them, or because it computes them.
    copies: None = the host computes them."""

    def __init__(
        self, sampler: Sampler, stages: Stages, inputs: InputBuilder, copies: Copies | None
    ) -> None:
        self.sampler = sampler
        self.stages = stages
        self.inputs = inputs
        self.copies = copies

    def add(self, new: NewRequest) -> None:
        token_ids = new.token_ids
        num_prompt_tokens = new.num_prompt_tokens
        for span in reversed(new.prompt_embeds):  # penalties do not see embeddings
            token_ids = np.delete(token_ids, slice(span.start, span.stop))
            num_prompt_tokens -= span.shape[0]
        self.sampler.add(new.row, new.params, new.seed, token_ids, num_prompt_tokens)

    def remove(self, rows: np.ndarray) -> None:
        self.sampler.remove(rows)

    def end(self, step: Step) -> Callable[[], StepOutput]:
        inputs = step.inputs
        if not len(inputs.sample_rows):
            return lambda: step.output
        logits = self.logits(step)
        # on a device this would wait
        broken = logits[:, 0].isnan() if self.copies is None else None
        sampled = self.sample(step, logits)
        tokens = sampled.token_ids.cpu().numpy()
        counts = sampled.counts.cpu().numpy()
        if inputs.draft_token_ids is None:  # one token per row
            flat = tokens[:, 0].astype(np.int32)
            offsets = inputs.offsets
        else:
            offsets = np.zeros(len(counts) + 1, np.int32)
            np.cumsum(counts, out=offsets[1:])
            flat = tokens[np.arange(tokens.shape[1]) < counts[:, None]].astype(np.int32)
        if broken is not None and broken.any():  # one of the logits rows of a row
            is_bad = np.logical_or.reduceat(broken.numpy(), inputs.offsets[:-1])
            flat[np.repeat(is_bad, counts)] = BAD_LOGITS
        step.output.token_ids = CSR(flat, offsets)
        self.sampled(inputs, tokens, counts)
        return lambda: step.output

    def logits(self, step: Step) -> Tensor:
        """Return the logits of the rows that need a token, [S, V]."""
        logits = step.logits
        if logits is None:
            index = step.inputs.logits_index
            logits = self.stages.logits(step.hidden if index is None else step.hidden[index])
        return expect(logits, Tensor, self.stages.model, "logits")

    def sample(self, step: Step, logits: Tensor) -> Sampled:
        inputs = step.inputs
        wanted = SampleStep(
            inputs.sample_rows,
            inputs.offsets,
            inputs.draft_token_ids,
            step.masks() if step.masks else None,
        )
        sampled = expect(self.sampler.sample(logits, wanted), Sampled, self.sampler, "sample")
        step.output.logprobs = sampled.logprobs
        return sampled

    def sampled(self, inputs: StepInputs, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Note the tokens in the rows' history. tokens: [rows, most], counts: [rows]."""
        self.inputs.state.append_tokens(inputs.sample_rows, tokens, counts)


class SampleAndDraft(SampleOnHost):
    """Also asks a draft plugin for the next step's drafts, after steps that have sampled."""

    def __init__(
        self,
        sampler: Sampler,
        stages: Stages,
        inputs: InputBuilder,
        copies: Copies | None,
        proposer: DraftProposer,
        limits: Limits,
    ) -> None:
        super().__init__(sampler, stages, inputs, copies)
        self.proposer = proposer
        self.limits = limits

    def add(self, new: NewRequest) -> None:
        super().add(new)
        self.proposer.add(new.row, new.token_ids)

    def remove(self, rows: np.ndarray) -> None:
        super().remove(rows)
        self.proposer.remove(rows)

    def end(self, step: Step) -> Callable[[], StepOutput]:
        wait = super().end(step)
        started = time.perf_counter()
        if len(step.inputs.sample_rows):
            step.output.draft_token_ids = self.propose(step.inputs, step.output.token_ids)
        self.draft_s = time.perf_counter() - started
        return wait

    def propose(
        self, inputs: StepInputs, sampled: CSR, computed: ComputedTokens | None = None
    ) -> CSR:
        """Ask the draft plugin for the next step's proposals, and keep them."""
        state = self.inputs.state
        rows = inputs.sample_rows
        most = self.limits.max_drafts if len(rows) <= self.limits.max_draft_rows else 0
        step = DraftStep(
            rows=rows,
            history=[state.token_ids[row, : state.num_tokens[row]] for row in rows],
            max_drafts=np.clip(self.limits.max_model_len - state.num_tokens[rows] - 1, 0, most),
            num_verified=np.diff(inputs.offsets) - 1,
            num_new=np.diff(sampled.offsets),
            computed=computed,
        )
        drafts = expect(self.proposer.propose(step), Drafts, self.proposer, "propose")
        state.proposals.update(zip(rows.tolist(), drafts.token_ids, strict=True))
        return CSR.of(drafts.token_ids)


class SampleAndFollow(SampleAndDraft):
    """Asks a draft plugin with a model, which computes all tokens that the target computes."""

    def end(self, step: Step) -> Callable[[], StepOutput]:
        num_tokens = step.inputs.num_tokens
        # a copy, because the logits may be a recording, which overwrites what others returned
        hidden = self.stages.taps or (step.hidden[:num_tokens].clone(),)
        wait = SampleOnHost.end(self, step)
        started = time.perf_counter()
        output = step.output
        computed = self.computed(step, output.token_ids, hidden)
        proposals = self.propose(step.inputs, output.token_ids, computed)
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
        return ComputedTokens(
            batch.rows, step.inputs.starts, counts, batch.samples, tuple(hidden)
        )


class SampleOnDevice(SampleOnHost):
    """Leaves one token per row on the device, where the next step reads it. The host reads its copy
    when the result is requested."""

    def end(self, step: Step) -> Callable[[], StepOutput]:
        inputs = step.inputs
        if not len(inputs.sample_rows):
            return lambda: step.output
        sampled = self.sample(step, self.logits(step))
        self.inputs.keep_sampled(inputs.sample_rows, sampled.token_ids[:, 0])
        self.inputs.state.append_unread(inputs.sample_rows)
        assert self.copies is not None, "the device has them"
        wait = self.copies.download(sampled.token_ids)

        def finish() -> StepOutput:
            step.output.token_ids = CSR(wait().numpy()[:, 0].astype(np.int32), inputs.offsets)
            return step.output

        return finish
