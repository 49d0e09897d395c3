"""What a runner is made of, and how its steps end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor

from pegboard.config.limits import Limits
from pegboard.interfaces.attention import KVPlan
from pegboard.interfaces.collective import Collective
from pegboard.interfaces.draft import DraftProposer, Forwards, PaddedProposer
from pegboard.interfaces.kv_connector import KVConnectorWorker
from pegboard.interfaces.platform import Copies, Trait
from pegboard.interfaces.pooler import Pooler
from pegboard.interfaces.sampler import Sampler
from pegboard.worker.borders import Sender
from pegboard.worker.draft_forwards import DraftForwards
from pegboard.worker.drafting import SampleAndDraft, SampleAndFollow
from pegboard.worker.drafting_ahead import SampleAhead
from pegboard.worker.endings import Ending, Pool, SampleOnDevice, SampleOnHost, Send
from pegboard.worker.exact_rows import ExactRows
from pegboard.worker.loaded_model import LoadedModel
from pegboard.worker.shared_rows import SharedRows
from pegboard.worker.stages import TRAITS, Stages
from pegboard.worker.step_inputs import InputBuilder


@dataclass(slots=True)
class RunnerParts:
    """What a runner computes with. All parts are built and bound. proposer: builds the draft plugin
    from the forwards of its model. draft: that model. drafts_ahead: see `Limits`. pooler: set for
    pooling models; nothing is sampled. traits: the stages to record. next_stage: where the rows go;
    None = this pipeline stage is the last one. shared_rows: of an encoder connector."""

    loaded: LoadedModel
    plan: KVPlan
    views: Mapping[int, Mapping[str, Tensor]]
    sampler: Sampler
    device: str
    limits: Limits
    copies: Copies | None = None
    proposer: Callable[[Forwards | None], DraftProposer] | None = None
    draft: LoadedModel | None = None
    drafts_ahead: bool = False
    connectors: Mapping[str, KVConnectorWorker] = field(default_factory=dict)
    pooler: Pooler | None = None
    traits: tuple[Trait, ...] = TRAITS
    next_stage: Collective | None = None
    shared_rows: SharedRows | None = None


def make_ending(
    parts: RunnerParts,
    stages: Stages,
    inputs: InputBuilder,
    exact: ExactRows | None,
    recomputes: bool,
) -> Ending:
    """Return how the steps end. exact: set if drafts stay on the device. recomputes: see
    `SampleAndDraft`."""
    if parts.next_stage is not None:
        return Send(Sender(parts.next_stage))
    if parts.pooler is not None:
        return Pool(parts.pooler, stages)
    usual = (parts.sampler, stages, inputs, parts.copies)
    if parts.proposer is not None and parts.draft is None:
        return SampleAndDraft(*usual, parts.proposer(None), parts.limits, recomputes)
    if parts.proposer is not None and parts.draft is not None:
        forwards = DraftForwards(parts.draft, parts.plan, inputs.state, parts.limits, parts.copies)
        if exact is not None and parts.copies is not None:
            proposer = cast(PaddedProposer, parts.proposer(forwards))
            ahead = (parts.sampler, stages, inputs, exact, parts.copies)
            return SampleAhead(*ahead, proposer, parts.limits)
        return SampleAndFollow(*usual, parts.proposer(forwards), parts.limits, recomputes)
    return (SampleOnHost if parts.copies is None else SampleOnDevice)(*usual)
