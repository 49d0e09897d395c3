"""How a step ends: with vectors, with tokens on the host or on the device, or in the next pipeline
stage. A runner is built with one of these endings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pegboard.data.batch import BAD_LOGITS, CSR, Batch, NewRequest, StepOutput, TokenMasks
from pegboard.data.pooling_params import PoolingParams
from pegboard.errors import expect
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
    masks: waits for the grammar masks; None = the step needs none. output: gets the results.
    started: when the step began (`time.perf_counter`)."""

    batch: Batch
    inputs: StepInputs
    hidden: Tensor
    logits: Tensor | None
    masks: Masks | None
    output: StepOutput
    started: float


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
    """Makes vectors of prompts, or values of classes."""

    def __init__(self, pooler: Pooler, stages: Stages) -> None:
        self.pooler = pooler
        self.stages = stages
        self.params: dict[int, PoolingParams] = {}

    def add(self, new: NewRequest) -> None:
        self.params[new.row] = new.pooling or PoolingParams()

    def remove(self, rows: np.ndarray) -> None:
        self.pooler.remove(rows)

    def end(self, step: Step) -> Callable[[], StepOutput]:
        inputs = step.inputs
        buffers = self.stages.inputs
        rows = step.batch.rows
        pool_step = PoolStep(
            rows=rows,
            offsets=inputs.starts,
            starts=inputs.query_start_loc[: len(rows) + 1],
            starts_on_device=buffers.query_start_loc.on_device[: len(rows) + 1],
            ends=step.batch.samples,
            last=inputs.logits_index,
            token_ids=buffers.input_ids.array[: inputs.num_tokens],
            params=[self.params[row] for row in rows.tolist()],
            classify=self.stages.logits,
        )
        buffers.has_adapters = False  # a head does not know which request has which state
        wait = self.pooler.pool(step.hidden[: inputs.num_tokens], pool_step)
        expect(wait, Callable, self.pooler, "pool")  # type: ignore[arg-type]

        def finish() -> StepOutput:
            step.output.embeddings = expect(wait(), list, self.pooler, "pool()")
            return step.output

        return finish


class Send(Ending):
    """Sends the rows to the next pipeline stage."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender

    def end(self, step: Step) -> Callable[[], StepOutput]:
        self.sender.send(step.hidden[: step.inputs.num_tokens])
        return lambda: step.output


def accepted(tokens: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first counts [S] of tokens [S, m] one after another, and the offsets [S + 1] of
    the rows."""
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return tokens[np.arange(tokens.shape[1]) < counts[:, None]].astype(np.int32), offsets


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
            flat, offsets = accepted(tokens, counts)
        if broken is not None and broken.any():  # one of the logits rows of a row
            is_bad = np.logical_or.reduceat(broken.numpy(), inputs.offsets[:-1])
            flat[np.repeat(is_bad, counts)] = BAD_LOGITS
        step.output.token_ids = CSR(flat, offsets)
        step.output.logprobs = sampled.shown()
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
            inputs.draft_probs,
        )
        return expect(self.sampler.sample(logits, wanted), Sampled, self.sampler, "sample")

    def sampled(self, inputs: StepInputs, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Note the tokens in the rows' history. tokens: [rows, most], counts: [rows]."""
        self.inputs.state.append_tokens(inputs.sample_rows, tokens, counts)


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
            step.output.logprobs = sampled.shown()
            return step.output

        return finish
