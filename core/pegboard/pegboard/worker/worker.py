"""The worker: everything that one rank holds, from start to stop. An executor calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pegboard.config.limits import Limits
from pegboard.config.schema import EngineConfig, eplb_config
from pegboard.data.batch import Batch, StepOutput
from pegboard.data.pooling_params import Pooling
from pegboard.data.request import LoRARequest
from pegboard.errors import ConfigError, RequestError, blame, did_you_mean
from pegboard.interfaces.attention import KVCacheSpec, KVGroup, KVPlan
from pegboard.interfaces.draft import DraftSource
from pegboard.interfaces.executor import (
    ENGINE_CALLS,
    SERVING_CALLS,
    START_CALLS,
    Place,
    WorkerReady,
)
from pegboard.interfaces.kernel import RECORDER
from pegboard.interfaces.platform import Replay, Trait
from pegboard.interfaces.weight_loader import Checkpoint, ShareFiles
from pegboard.log import get_logger
from pegboard.plugins.registry import Registry
from pegboard.plugins.selection import Decision
from pegboard.worker import memory
from pegboard.worker.adapters import Adapters, read_files
from pegboard.worker.draft_forwards import load_draft
from pegboard.worker.drafting_ahead import runs_ahead
from pegboard.worker.endings import Masks
from pegboard.worker.expert_balance import ExpertBalance
from pegboard.worker.first_steps import try_steps
from pegboard.worker.loaded_model import LoadedModel
from pegboard.worker.lockstep import make_runner
from pegboard.worker.model_loader import check_memory
from pegboard.worker.model_runner import ModelRunner
from pegboard.worker.parts import (
    Ranks,
    WorkerSetup,
    choose_sampler,
    lora_limits,
    make_connectors,
    make_pooler,
    make_sampler,
    proposer_of,
    take_device,
)
from pegboard.worker.room import STEPS, WEIGHTS, explained, left_for_cache, models_to_record
from pegboard.worker.runner_parts import RunnerParts
from pegboard.worker.shared_rows import make_shared_rows
from pegboard.worker.stages import TRAITS
from pegboard.worker.weight_memory import WeightMemory, fall_asleep, host_bytes, releasable
from pegboard.worker.weight_transfer import call_receiver

if TYPE_CHECKING:
    from pegboard.interfaces.tokenizer import Vocabulary

log = get_logger(__name__)

STAGES_OF: Mapping[str | None, tuple[Trait, ...]] = {
    None: TRAITS,
    "embed": ("forward",),
    "classify": ("forward", "logits"),
}
"""What a pooling model makes → the stages that its steps use. None = it generates text."""


@dataclass(frozen=True)
class WorkerPlan:
    """What a worker is built from. config: contains no "auto", because the engine has filled in the
    platform's defaults. checkpoint: of the target, which answers
    requests. vocabulary: reads the tokenizer's vocabulary. pooling: what is made of prompts; None =
    tokens are sampled. meeting: where the ranks of all engines meet, as `Place.address`; "" = they
    do not. draft: what the draft model is built from; None = there is none."""

    config: EngineConfig
    limits: Limits
    checkpoint: Checkpoint
    vocabulary: Callable[[], "Vocabulary"]
    pooling: Pooling | None = None
    meeting: str = ""
    draft: DraftSource | None = None


def traits_of(pooling: Pooling | None, ranks: Ranks) -> tuple[Trait, ...]:
    """Return the traits that the steps of a rank use. Rows that engines exchange are not
    recorded."""
    stage = ranks.stage
    used = {"forward", *(["logits"] if stage.is_last else [])} if stage.count > 1 else {*TRAITS}
    if ranks.engines is not None:
        used = {"logits"}
    return tuple(trait for trait in STAGES_OF[pooling.makes if pooling else None] if trait in used)


def part_of_group(group: KVGroup, specs: Mapping[int, KVCacheSpec]) -> KVGroup:
    """Return a KV group of those layers that a rank has. specs: what it stores of them."""
    layers = tuple(layer for layer in group.layers if layer in specs)
    spec = specs[layers[0]] if layers else group.spec
    return msgspec.structs.replace(group, layers=layers, spec=spec)


class Worker:
    """The order of calls is load → allocate → warm_up → run … → stop. models: the target, and the
    draft model if there is one. extension_methods: the names that `worker_extension_cls` has added.
    balance: moves experts between ranks; None = they stay. drafts_ahead: see `Limits`."""

    setup: WorkerSetup
    runner: ModelRunner | None = None
    replay: Replay | None = None
    extension_methods: frozenset[str] = frozenset()
    balance: ExpertBalance | None = None

    def __init__(self, registry: Registry, plan: WorkerPlan, place: Place) -> None:
        self.registry = registry
        self.plan = plan
        self.rank = place.rank
        self.place = place
        self.config = plan.config
        self.limits = plan.limits
        self.models: list[LoadedModel] = []
        self._vocabulary = cache(plan.vocabulary)

    # --- start-up ---------------------------------------------------------------------------------

    def declare(self) -> None:
        """Take the device and build the models without weights. Raises as `load` does."""
        config = self.config
        self.setup = take_device(self.registry, config, self.limits, self.place, self.plan.meeting)
        choose_sampler(self.setup)
        draft = self.plan.draft
        with explained(self.setup.platform, *WEIGHTS), releasable(self.setup, "weights"):
            target = LoadedModel(
                self.setup,
                self.plan.checkpoint,
                lora=lora_limits(config),
                layers=range(1) if config.mm_encoder_only else None,
                taps=draft.taps if draft is not None else (),
                quantization=config.quantization,
                pooling=self.plan.pooling,
            )
            self.models.append(target)
            if draft is not None:
                self.models.append(load_draft(self.setup, draft, target))

    def load(self) -> WorkerReady:
        """Take the device, build the models and load their weights. Raises ModelError, ConfigError
        or PluginError."""
        with blame(None, self.registry.modules):
            self.declare()
            for model in self.models:
                free_bytes = self.setup.platform.memory().free_bytes + host_bytes(self.config)
                free_bytes *= self.setup.ranks.tensor.size  # each rank holds a share
                check_memory(model.declared, model.checkpoint, model.quantization, free_bytes)
                with explained(self.setup.platform, *WEIGHTS), releasable(self.setup, "weights"):
                    model.load()
            if (eplb := eplb_config(self.config)) is not None:
                layers = [layer for model in self.models for layer in model.layers]
                self.balance = ExpertBalance(
                    layers, self.setup.ranks.tensor, eplb, self.setup.device.name
                )
            specs = {i: spec for model in self.models for i, spec in model.kv_specs().items()}
            self.drafts_ahead = runs_ahead(self.models[0], specs)
            if self.config.calculate_kv_scales:
                plan, prompt = memory.random_prompt(specs, self.limits)
                self._bind(plan, memory.allocate(plan, self.setup.platform.zeros))
                for model in self.models:
                    model.calculate_scales()
                try_steps(self.running, prompt)
                self.runner = None
            return WorkerReady(
                self.rank,
                specs,
                self._kv_memory_bytes(specs),
                sum(model.weight_bytes() for model in self.models),
                ", ".join(model.attention.layout() for model in self.models),
                self.drafts_ahead,
            )

    def _kv_memory_bytes(self, specs: Mapping[int, KVCacheSpec]) -> int:
        """Return the bytes for the KV cache that the user or the platform has set. If none is set,
        run the largest step and record some to measure their memory, and return what is left of
        the device's share."""
        if self.config.kv_cache_memory_bytes is not None:
            return self.config.kv_cache_memory_bytes
        platform = self.setup.platform
        plan = memory.null_plan(specs, self.limits.block_size)
        self._bind(plan, memory.allocate(plan, platform.zeros))
        platform.memory(reset_peak=True)
        try_steps(self.running, memory.largest_batch(self.limits, len(plan.groups)))
        left = left_for_cache(self.setup, self.models, self.running.kept_rows_bytes())
        self.runner = None
        return left

    def _bind(self, plan: KVPlan, views: Mapping[int, Mapping[str, Any]], **parts: Any) -> None:
        """Bind all models to this memory of the KV cache, and make the runner. parts: more parts of
        it."""
        setup = self.setup
        sampler = make_sampler(setup, self._vocabulary)
        for model in self.models:
            model.bind(plan, views)
        self.runner = make_runner(
            RunnerParts(
                loaded=self.models[0],
                plan=plan,
                views=views,
                sampler=sampler,
                device=setup.device.name,
                limits=self.limits,
                copies=setup.platform.copies(),
                proposer=proposer_of(setup, sampler),
                draft=self.models[1] if self.plan.draft is not None else None,
                drafts_ahead=self.drafts_ahead,
                pooler=make_pooler(setup, self.plan.pooling, self._vocabulary),
                traits=traits_of(self.plan.pooling, setup.ranks),
                next_stage=setup.ranks.after,
                **parts,
            )
        )

    def allocate(self, kv_plan: KVPlan) -> None:
        """Take the KV memory, bind every layer and make the runners. Earlier recordings are
        discarded. kv_plan: of all layers, as the first rank of each stage holds them; others may
        hold fewer heads."""
        if self.replay is not None:
            self.replay.reset()
        specs = {i: spec for model in self.models for i, spec in model.kv_specs().items()}
        groups = [part_of_group(group, specs) for group in kv_plan.groups]
        kv_plan = msgspec.structs.replace(kv_plan, groups=tuple(groups))
        platform = self.setup.platform
        with releasable(self.setup, "kv_cache"):
            views = memory.allocate(kv_plan, platform.zeros, platform.memory().total_bytes)
        self._bind(
            kv_plan,
            views,
            connectors=make_connectors(self.setup, kv_plan, views),
            shared_rows=make_shared_rows(self.models[0]),
        )

    def warm_up(self) -> list[Decision]:
        """Run one step of every kind, in which what plugins return is checked, record what the
        models compute, and run the steps again. A stage that cannot be recorded runs eagerly, and
        the log says why. A model that cannot run is an error here and not at the first request.
        Returns what this rank has chosen."""
        parts = self.running.parts
        steps = [*memory.trial_steps(self.limits, len(parts.plan.groups))]
        try_steps(self.running, *steps)
        setup = self.setup
        if self.config.enforce_eager:
            self.replay = None
            refusals = ["every step runs eagerly: enforce_eager is set"]
        elif (replay := setup.platform.replay(setup.kernels.replay)) is None:
            self.replay = None
            refusals = ["every step runs eagerly"]
        else:
            self.replay = replay
            refusals = []
            if self.config.spec_enforce_eager:
                refusals.append("the draft model runs eagerly: spec_enforce_eager is set")
            for model in models_to_record(self.models, self.config):
                with blame(model.entry.id, self.registry.modules):
                    refusals += model.record(replay)
            for batch in steps:
                self.running.run(batch)()
            if refusals:
                log.info("not replayed: %s", "; ".join(refusals))
        unmade = Decision("kernel", None, key=RECORDER)
        decision = self.registry.decisions.get(("kernel", RECORDER)) or unmade
        notes = tuple(f"not replayed: {refusal}" for refusal in refusals)
        self.registry.record(replace(decision, notes=notes))
        for view in memory.tensors_of(parts.views):  # what the steps wrote
            view[0].zero_()
        if self.balance is not None:
            self.balance.forget()
        return list(self.registry.decisions.values())

    def embedding_size(self) -> int:
        """Return the width of the rows that the model's `embed` returns."""
        return self.running.embedding_size()

    # --- serving ----------------------------------------------------------------------------------

    @property
    def running(self) -> ModelRunner:
        """Return the runner, which exists after `allocate`."""
        assert self.runner is not None, "call allocate() before the first step"
        return self.runner

    @property
    def model(self) -> Any:
        """Return the target's module."""
        return self.models[0].model

    def run(self, batch: Batch, masks: Masks | None = None) -> Callable[[], StepOutput]:
        """Run one step. The returned callable waits for its result. The next step may be run before
        that."""
        platform = self.setup.platform
        with blame(None, self.registry.modules), explained(platform, *STEPS):
            finish = self.running.run(batch, masks)
            if self.balance is not None and batch.num_rows:
                self.balance.end_step()
            return finish

    def call(self, method: str, *args: object) -> object:
        """Run one of START_CALLS, SERVING_CALLS and ENGINE_CALLS."""
        known = START_CALLS | SERVING_CALLS | ENGINE_CALLS
        if method not in known:
            raise ConfigError(
                f"workers have no method {method!r}; known: {', '.join(sorted(known))}"
            )
        with blame(None, self.registry.modules):
            return getattr(self, method)(*args)

    def collective_rpc(
        self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call `method(worker, …)`, or the worker's method of this name. Only SERVING_CALLS and
        methods of the extension can be named. Raises RequestError for others, and what the method
        raises."""
        if not isinstance(method, str):
            return method(self, *args, **kwargs)
        known = SERVING_CALLS | self.extension_methods
        if method not in known:
            advice = did_you_mean(method, known) or f"; they have {', '.join(sorted(known))}"
            message = (
                f"workers have no method {method[:60]!r}{advice}; worker_extension_cls adds methods"
            )
            raise RequestError(message, parameter="method")
        return getattr(self, method)(*args, **kwargs)

    @cached_property
    def adapters(self) -> Adapters:
        """The LoRA adapters that this rank keeps in memory."""
        target = self.models[0]
        return Adapters(
            target.layers,
            lambda lora: read_files(self.registry, target.checkpoint, lora),
            target.build.declared.absent,
            target.build.declared.aliases,
        )

    def read_adapter(self, ticket: int, adapter: LoRARequest) -> tuple[str, str] | None:
        """Start to read an adapter in a thread. Return None until that has ended, and then its
        digest, or "" and why it cannot be used."""
        return self.adapters.read(ticket, adapter)

    def load_adapter(self, slot: int, ticket: int) -> None:
        """Copy an adapter that was read into a slot of every layer."""
        self.adapters.load(slot, ticket)

    def drop_adapters(self, tickets: list[int]) -> None:
        """Forget adapters that were read."""
        self.adapters.drop(tickets)

    def sleep(self, level: int) -> None:
        """Release the memory of the KV cache and of the weights. level 1: the weights are saved; 2:
        they are read again."""
        release = getattr(self.setup.platform, "release", None)
        if release is None:
            raise ConfigError(
                f"the platform {self.setup.platform_name} cannot release memory; level 0 pauses "
                "the engine and keeps it"
            )
        if self.balance is not None:
            self.balance.restore()
        weights = WeightMemory(self.models, release)
        cache = memory.tensors_of(self.running.parts.views)
        self.asleep = fall_asleep(weights, level, cache, release)

    def wake_up(self, tags: list[str]) -> None:
        """Take the memory of these parts again, "weights" or "kv_cache". The KV cache is zero."""
        for tag in tags:
            self.asleep[tag]()

    def update_weights(self, checkpoint: Checkpoint | None) -> None:
        """Fill the target from another checkpoint of the same model. If it cannot be read or has
        values that are not finite, it is filled from the last one again. None = undo the last
        update, because it has failed on another rank. Raises ModelError, and EngineDeadError if the
        last one cannot be read either."""
        if self.balance is not None:
            self.balance.restore()
        if checkpoint is None:
            self.models[0].undo_update()
        else:
            self.models[0].update(checkpoint)

    def transfer_weights(self, call: str, *arguments: object) -> object:
        """Call a method of the `WeightReceiver`, which is made for the first call."""
        return call_receiver(self, call, *arguments)

    def save_sharded_state(self, path: str, pattern: str | None, max_size: int | None) -> None:
        """Write what this rank reads of the target's checkpoint. Raises ModelError."""
        files = ShareFiles(folder=Path(path), pattern=pattern, max_bytes=max_size)
        self.models[0].save(files)

    def profile(self, path: str | None) -> None:
        """Start the profiler, which writes below `path`. If `path` is None, stop it."""
        self.setup.platform.profile(Path(path) if path else None)

    def memory(self) -> dict[str, int]:
        """Return the platform's numbers, in bytes."""
        return memory.by_name(self.setup.platform.memory())

    def stop(self) -> None:
        """Close the connectors and forget everything, for good. What the models and the KV cache
        took of the device is given back at once, because another engine may start there."""
        for name in ("adapters", "receiver"):
            if name in vars(self):
                vars(self)[name].close()
        for connector in self.running.parts.connectors.values() if self.runner else ():
            connector.close()
        if self.runner and (shared := self.running.parts.shared_rows) is not None:
            shared.connector.close()
        if self.replay is not None:
            self.replay.reset()
        setup = vars(self).get("setup")
        vars(self).clear()
        if setup is not None:
            setup.ranks.close()
            setup.platform.memory(reset_peak=True)
