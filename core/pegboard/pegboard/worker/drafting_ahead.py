"""How a step ends if the next one, with drafts, may be scheduled before its tokens are known."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pegboard.config.limits import Limits
from pegboard.data.batch import CSR, NewRequest, StepOutput
from pegboard.errors import expect
from pegboard.interfaces.attention import Encoder, KVCacheSpec
from pegboard.interfaces.draft import DraftSpec, PaddedProposer, PaddedStep
from pegboard.interfaces.platform import Copies
from pegboard.interfaces.sampler import Sampled, Sampler
from pegboard.log import get_logger
from pegboard.worker.endings import SampleOnHost, Step, accepted
from pegboard.worker.exact_rows import ExactRows
from pegboard.worker.loaded_model import LoadedModel
from pegboard.worker.parts import choose_draft
from pegboard.worker.stages import Stages
from pegboard.worker.step_inputs import InputBuilder, StepInputs

log = get_logger(__name__)


def runs_ahead(target: LoadedModel, specs: Mapping[int, KVCacheSpec]) -> bool:
    """Return whether steps with drafts need not wait for the one before (see `Limits`). specs: what
    all layers store."""
    setup = target.setup
    entry = choose_draft(setup)
    if entry is None or setup.platform.copies() is None:
        return False  # the device computes in the host's memory
    spec = setup.registry.spec(entry)
    assert isinstance(spec, DraftSpec), "the registry has checked it"
    reason = _why_not(target, specs, spec)
    if reason:
        log.info("each step with drafts waits for the one before: %s", reason)
    return not reason


def _why_not(target: LoadedModel, specs: Mapping[int, KVCacheSpec], spec: DraftSpec) -> str:
    declared = target.build.declared
    stage = target.build.stage
    if target.setup.config.spec_disable_padded_drafter_batch:
        return "disable_padded_drafter_batch is set"
    if "padded" not in spec.flags:
        return "the draft plugin needs the tokens on the host"
    if not (stage.is_first and stage.is_last):
        return "there are pipeline stages"
    if any(each.ranks > 1 or each.unit != "token" for each in specs.values()):
        return "layers have states, or share out the tokens of a request"
    if any(isinstance(each.retain, Encoder) for each in specs.values()):
        return "layers attend to the output of an encoder"
    if declared.axes or any(layer.sees_items for layer in declared.attention.values()):
        return "positions depend on images"
    return ""


class SampleAhead(SampleOnHost):
    """Leaves tokens and drafts on the device, where the next step reads them. The host reads a copy
    of the tokens when the result is requested, and one of the drafts if a grammar needs them."""

    def __init__(
        self,
        sampler: Sampler,
        stages: Stages,
        inputs: InputBuilder,
        exact: ExactRows,
        copies: Copies,
        proposer: PaddedProposer,
        limits: Limits,
    ) -> None:
        super().__init__(sampler, stages, inputs, copies)
        self.exact = exact
        self.downloads = copies
        self.proposer = proposer
        self.limits = limits
        rows = limits.max_num_seqs
        self._firsts = inputs.buffer(rows)
        self._index = inputs.buffer(inputs.max_tokens)
        self._none = torch.zeros(0, dtype=torch.int64, device=inputs.device)

    def add(self, new: NewRequest) -> None:
        super().add(new)
        self.proposer.add(new.row, new.token_ids)

    def remove(self, rows: np.ndarray) -> None:
        super().remove(rows)
        self.proposer.remove(rows)

    def end(self, step: Step) -> Callable[[], StepOutput]:
        inputs = step.inputs
        output = step.output
        # a copy, because the logits may be a recording, which overwrites what others returned
        hidden = self.stages.taps or (step.hidden[: inputs.num_tokens].clone(),)
        waits: list[Callable[[], Tensor]] = []
        sampled: Sampled | None = None
        padded = self._padded(step, tuple(hidden))
        if len(inputs.sample_rows):
            sampled = self.sample(step, self.logits(step))
            waits += [self.downloads.download(each) for each in (sampled.token_ids, sampled.counts)]
            self._keep(padded, inputs, sampled)
        started = time.perf_counter()
        # the embedding and the head that a draft model shares are those of the base model
        self.inputs.has_adapters = False
        drafts = self._propose(padded, inputs.sample_rows)
        if step.masks is not None and drafts is not None:
            waits.append(self.downloads.download(drafts))
        self.draft_s = time.perf_counter() - started

        def finish() -> StepOutput:
            if sampled is not None:
                tokens, counts, *proposed = (wait().numpy() for wait in waits)
                output.token_ids = CSR(*accepted(tokens, counts))
                output.logprobs = sampled.shown()
                output.draft_token_ids = CSR.of([*proposed[0]]) if proposed else None
            return output

        return finish

    def _padded(self, step: Step, hidden: tuple[Tensor, ...]) -> PaddedStep:
        """Return what the proposer gets, without what depends on the sampled tokens."""
        batch = step.batch
        inputs = step.inputs
        assert inputs.exact is not None, "the inputs were built with `exact`"
        num_sampled = len(inputs.sample_rows)
        none = self._none
        return PaddedStep(
            rows=batch.rows,
            starts=inputs.starts,
            counts=batch.num_scheduled_tokens.astype(np.int64),
            samples=batch.samples,
            depths=self.limits.max_drafts if num_sampled <= self.limits.max_draft_rows else 0,
            hidden=hidden,
            exact=inputs.exact,
            places=none,
            token_ids=none,
            last=none,
            newest=none,
            ends=none,
        )

    def _keep(self, padded: PaddedStep, inputs: StepInputs, sampled: Sampled) -> None:
        """Note what was sampled, for the proposer and the next step."""
        builder = self.inputs
        rows = inputs.sample_rows
        offsets = inputs.offsets
        num_rows = len(rows)
        count = int(offsets[-1])
        width = sampled.token_ids.shape[1]
        owners = np.repeat(np.arange(num_rows), np.diff(offsets))
        self._firsts.array[:num_rows] = offsets[:-1]
        self._index.array[:count] = np.arange(count) - offsets[owners] + owners * np.int64(width)
        places = inputs.logits_index
        if places is None:  # all tokens in order
            places = torch.arange(count, device=builder.device)
        right = sampled.counts - 1
        padded.places = places
        padded.token_ids = (
            sampled.token_ids.flatten().index_select(0, self._index.sent(count)).clamp_(min=0)
        )
        padded.last = places.index_select(0, self._firsts.sent(num_rows) + right)
        padded.newest = sampled.token_ids.gather(1, right.unsqueeze(1)).squeeze(1)
        padded.ends = builder.positions.on_device.index_select(0, padded.last) + 1
        index = builder.keep_sampled(rows, padded.newest)
        self.exact.ends.index_copy_(0, index, padded.ends)

    def _propose(self, padded: PaddedStep, rows: np.ndarray) -> Tensor | None:
        """Ask for the drafts of rows [S], and keep them. Returns them, [S, n], or None if there are
        none."""
        proposer = self.proposer
        num_rows = len(rows)
        proposed = expect(proposer.propose_padded(padded), tuple, proposer, "propose_padded")
        drafts, probs = proposed
        if not (num_rows and padded.depths):
            self.inputs.state.proposals.keep_probs(rows, None)
            return None
        index = self.inputs.sampled_rows.on_device[:num_rows]
        kept = functional.pad(drafts, (0, self.exact.max_drafts - drafts.shape[1]))
        self.exact.drafts.index_copy_(0, index, kept)
        self.inputs.state.proposals.keep_probs(rows, None if probs is None else probs.unbind())
        return kept
