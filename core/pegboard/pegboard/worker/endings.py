"""What becomes of the hidden states of a step: vectors, or tokens on the host or on the device. A
runner is built with one of these endings."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from torch import Tensor

from pegboard.config.limits import Limits
from pegboard.data.batch import BAD_LOGITS, CSR, NewRequest, StepOutput, TokenMasks
from pegboard.errors import expect
from pegboard.interfaces.draft import DraftProposer, Drafts, DraftStep
from pegboard.interfaces.platform import Copies
from pegboard.interfaces.sampler import Sampled, Sampler, SampleStep
from pegboard.worker.draft_lengths import DraftLengths
from pegboard.worker.pooler import Pooler
from pegboard.worker.stages import Stages
from pegboard.worker.step_inputs import InputBuilder, RowState, StepInputs

Masks = Callable[[], TokenMasks]


class Ending:
    """draft_s: seconds that the last step took to propose drafts."""

    draft_s = 0.0

    def add(self, new: NewRequest) -> None:
        """A request starts or resumes in a row."""

    def remove(self, rows: np.ndarray) -> None:
        """Requests have left these rows."""

    def end(
        self,
        inputs: StepInputs,
        hidden: Tensor,
        logits: Tensor | None,
        masks: Masks | None,
        output: StepOutput,
    ) -> Callable[[], StepOutput]:
        """Turn the hidden states [T, size] into the step's results, in `output`. logits: [S, V] if
        the step has computed them already. masks: waits for the grammar masks; None = the step
        needs none. The returned callable waits for the results."""
        return lambda: output


class Pool(Ending):
    def __init__(self, pooler: Pooler, stages: Stages) -> None:
        self.pooler = pooler
        self.stages = stages

    def add(self, new: NewRequest) -> None:
        self.pooler.add(new)

    def end(
        self,
        inputs: StepInputs,
        hidden: Tensor,
        logits: Tensor | None,
        masks: Masks | None,
        output: StepOutput,
    ) -> Callable[[], StepOutput]:
        if len(inputs.sample_rows):
            output.embeddings = self.pooler.pool(hidden, inputs, self.stages.logits)
        return lambda: output


class SampleOnHost(Ending):
    """The host waits for the tokens, because drafts depend on them, or because it computes them.
    copies: None = the host computes them."""

    def __init__(
        self, sampler: Sampler, stages: Stages, state: RowState, copies: Copies | None
    ) -> None:
        self.sampler = sampler
        self.stages = stages
        self.state = state
        self.copies = copies

    def add(self, new: NewRequest) -> None:
        # no ids: penalties do not see embeddings
        num_ids = 0 if new.prompt_embeds is None else new.num_prompt_tokens
        self.sampler.add(
            new.row, new.params, new.seed, new.token_ids[num_ids:], new.num_prompt_tokens - num_ids
        )

    def remove(self, rows: np.ndarray) -> None:
        self.sampler.remove(rows)

    def end(
        self,
        inputs: StepInputs,
        hidden: Tensor,
        logits: Tensor | None,
        masks: Masks | None,
        output: StepOutput,
    ) -> Callable[[], StepOutput]:
        if not len(inputs.sample_rows):
            return lambda: output
        logits = self.logits(inputs, hidden, logits)
        # on a device this would wait
        broken = logits[:, 0].isnan() if self.copies is None else None
        sampled = self.sample(inputs, logits, masks, output)
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
        output.token_ids = CSR(flat, offsets)
        self.sampled(inputs, tokens, counts)
        return lambda: output

    def logits(self, inputs: StepInputs, hidden: Tensor, logits: Tensor | None) -> Tensor:
        """Return the logits of the rows that need a token, [S, V]."""
        if logits is None:
            index = inputs.logits_index
            logits = self.stages.logits(hidden if index is None else hidden[index])
        return expect(logits, Tensor, self.stages.model, "logits")

    def sample(
        self, inputs: StepInputs, logits: Tensor, masks: Masks | None, output: StepOutput
    ) -> Sampled:
        step = SampleStep(
            inputs.sample_rows, inputs.offsets, inputs.draft_token_ids, masks() if masks else None
        )
        sampled = expect(self.sampler.sample(logits, step), Sampled, self.sampler, "sample")
        output.logprobs = sampled.logprobs
        return sampled

    def sampled(self, inputs: StepInputs, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Note the tokens in the rows' history. tokens: [rows, most], counts: [rows]."""
        self.state.append_tokens(inputs.sample_rows, tokens, counts)


class SampleAndDraft(SampleOnHost):
    """Also asks a draft plugin for the next step's drafts."""

    def __init__(
        self,
        sampler: Sampler,
        stages: Stages,
        state: RowState,
        copies: Copies | None,
        draft: DraftProposer,
        limits: Limits,
    ) -> None:
        super().__init__(sampler, stages, state, copies)
        self.draft = draft
        self.lengths = DraftLengths(limits, fixed_tokens=1 if copies is None else 64)
        self.max_model_len = limits.max_model_len

    def add(self, new: NewRequest) -> None:
        super().add(new)
        self.draft.add(new.row, new.token_ids)
        self.lengths.add(new.row)

    def remove(self, rows: np.ndarray) -> None:
        super().remove(rows)
        self.draft.remove(rows)

    def end(
        self,
        inputs: StepInputs,
        hidden: Tensor,
        logits: Tensor | None,
        masks: Masks | None,
        output: StepOutput,
    ) -> Callable[[], StepOutput]:
        wait = super().end(inputs, hidden, logits, masks, output)
        started = time.perf_counter()
        if len(inputs.sample_rows):
            output.draft_token_ids = self.propose(inputs)
        self.draft_s = time.perf_counter() - started
        return wait

    def sampled(self, inputs: StepInputs, tokens: np.ndarray, counts: np.ndarray) -> None:
        self.lengths.observe(inputs.sample_rows.tolist(), inputs.offsets, tokens, counts)
        super().sampled(inputs, tokens, counts)

    def propose(self, inputs: StepInputs) -> CSR:
        """Ask the draft plugin for the next step's proposals, and keep them."""
        state = self.state
        rows = inputs.sample_rows
        numbers = rows.tolist()
        room = self.max_model_len - state.num_tokens[rows] - 1
        history = [state.token_ids[row, : state.num_tokens[row]] for row in rows]
        step = DraftStep(rows, history, np.clip(room, 0, self.lengths.ask(numbers)))
        drafts = expect(self.draft.propose(step), Drafts, self.draft, "propose")
        proposals = self.lengths.cut(numbers, drafts.token_ids)
        state.drafts.update(zip(numbers, proposals, strict=True))
        return CSR.of(proposals)


class SampleOnDevice(SampleOnHost):
    """Leaves one token per row on the device, where the next step reads it. The host reads its copy
    when the result is requested."""

    def __init__(
        self,
        sampler: Sampler,
        stages: Stages,
        state: RowState,
        copies: Copies,
        inputs: InputBuilder,
    ) -> None:
        super().__init__(sampler, stages, state, copies)
        self.download = copies.download
        self.inputs = inputs

    def end(
        self,
        inputs: StepInputs,
        hidden: Tensor,
        logits: Tensor | None,
        masks: Masks | None,
        output: StepOutput,
    ) -> Callable[[], StepOutput]:
        if not len(inputs.sample_rows):
            return lambda: output
        logits = self.logits(inputs, hidden, logits)
        sampled = self.sample(inputs, logits, masks, output)
        self.inputs.keep_sampled(inputs.sample_rows, sampled.token_ids[:, 0])
        self.state.append_unread(inputs.sample_rows)
        wait = self.download(sampled.token_ids)

        def finish() -> StepOutput:
            output.token_ids = CSR(wait().numpy()[:, 0].astype(np.int32), inputs.offsets)
            return output

        return finish
