"""The worker: everything that one rank holds, from start to stop. An executor calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard.config.limits import Limits
from pegboard.config.schema import EngineConfig
from pegboard.data.batch import Batch, StepOutput
from pegboard.data.pooling_params import Pooling
from pegboard.data.request import LoRARequest
from pegboard.errors import ConfigError, ModelError, RequestError, blame, did_you_mean, expect
from pegboard.interfaces.attention import AttentionNeed, AttentionSetup, KVCacheSpec, KVPlan, State
from pegboard.interfaces.draft import DraftNeed, DraftProposer, DraftSetup
from pegboard.interfaces.executor import ENGINE_CALLS, SERVING_CALLS, START_CALLS, WorkerReady
from pegboard.interfaces.kernel import RECORDER
from pegboard.interfaces.kv_connector import KVConnectorSetup, KVConnectorSpec, KVConnectorWorker
from pegboard.interfaces.logits_processor import LogitsProcessorSetup
from pegboard.interfaces.platform import Device, PlatformSetup, Replay, Trait
from pegboard.interfaces.pooler import Pooler, PoolerSetup
from pegboard.interfaces.quantization import QuantizationNeed, QuantizationSetup
from pegboard.interfaces.sampler import Sampler, SamplerSetup
from pegboard.interfaces.spec import Need
from pegboard.interfaces.weight_loader import (
    Checkpoint,
    WeightLoader,
    WeightLoaderSetup,
    WeightLoaderSpec,
)
from pegboard.layers import Build
from pegboard.layers.build import LoRALimits, WeightLayer
from pegboard.log import get_logger
from pegboard.ops import AdapterRows
from pegboard.plugins.defaults import default_name
from pegboard.plugins.importing import import_part
from pegboard.plugins.registry import Registry
from pegboard.plugins.selection import Decision
from pegboard.worker import memory
from pegboard.worker.adapters import Adapters
from pegboard.worker.attention_groups import AttentionGroups
from pegboard.worker.endings import Masks
from pegboard.worker.first_steps import checked
from pegboard.worker.kernels import choose_kernels
from pegboard.worker.model_loader import (
    bind_layers,
    check_memory,
    check_tensors,
    fill_layers,
    fill_or_restore,
    repack_cache,
)
from pegboard.worker.model_runner import ModelRunner, RunnerParts
from pegboard.worker.stages import TRAITS
from pegboard.worker.weight_memory import WeightMemory, num_bytes

if TYPE_CHECKING:
    from pegboard.interfaces.tokenizer import Vocabulary

log = get_logger(__name__)

STATE_EVERY = 512
"""Tokens between two states that the prefix cache keeps, if mamba_block_size is not set."""


STAGES_OF: Mapping[str | None, tuple[Trait, ...]] = {
    None: TRAITS,
    "embed": ("forward",),
    "classify": ("forward", "logits"),
}
"""Task of a pooling model → the stages that its steps use. None = it generates text."""


@dataclass(frozen=True)
class WorkerPlan:
    """What a worker is built from. config: contains no "auto", because the engine has filled in the
    platform's defaults. vocabulary: reads the tokenizer's vocabulary. pooling: what is made of
    prompts; None = tokens are sampled."""

    config: EngineConfig
    limits: Limits
    checkpoint: Checkpoint
    vocabulary: Callable[[], "Vocabulary"]
    pooling: Pooling | None = None


class Worker:
    """The order of calls is load → allocate → warm_up → run … → stop. extension_methods: the names
    that `worker_extension_cls` has added."""

    runner: ModelRunner | None = None
    replay: Replay | None = None
    extension_methods: frozenset[str] = frozenset()

    def __init__(self, registry: Registry, plan: WorkerPlan, rank: int) -> None:
        self.registry = registry
        self.plan = plan
        self.rank = rank
        self.config = plan.config
        self.limits = plan.limits
        self._vocabulary = cache(plan.vocabulary)

    # --- start-up ---------------------------------------------------------------------------------

    def load(self) -> WorkerReady:
        """Take the device, build the model and load its weights. Raises ModelError, ConfigError or
        PluginError."""
        self.declare()
        checkpoint = self.plan.checkpoint
        check_memory(
            self.declared, checkpoint, self.config.quantization, self.platform.memory().free_bytes
        )
        self._fill(checkpoint)
        weights = [
            layer.method for layer in self.build.declared.layers if isinstance(layer, WeightLayer)
        ]
        weight_bytes = sum(num_bytes(each.tensors()) for each in weights if each is not None)
        specs = self.attention.kv_specs()
        if self.config.calculate_kv_scales:
            self._calculate_kv_scales(specs)
        return WorkerReady(
            self.rank, specs, self._kv_memory_bytes(specs), weight_bytes, self.attention.layout()
        )

    def _loader(self, checkpoint: Checkpoint) -> WeightLoader:
        entry = self.registry.choose("weight_loader", Need(), explicit=checkpoint.format).require()
        return self.registry.build(entry, WeightLoaderSetup(seed=self.config.seed))

    def declare(self) -> None:
        """Take the device, build the model without weights, choose the attention backends, and ask
        the layers for the tensors that they need. Raises as `load` does."""
        config = self.config
        entry = self.registry.choose("platform", Need(), explicit=config.device).require()
        self.platform_name = entry.name
        self.platform = self.registry.build(entry, PlatformSetup(num_threads=config.num_threads))
        self.device = expect(self.platform.start(self.rank), Device, self.platform, "start")
        asked = config.sampler or default_name("sampler")
        self.sampler_entry = self.registry.choose(
            "sampler", Need(platform=entry.name), explicit=asked
        ).require()
        self.kernels = choose_kernels(self.registry, platform=entry.name, dtype=config.dtype)
        self._build_model()
        declared = self.build.declared
        kv_dtype = None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        need = AttentionNeed(
            platform=entry.name,
            dtype=config.dtype,
            kv_dtype=kv_dtype,
            block_size=self.limits.block_size,
        )
        setup = AttentionSetup(
            (), config.dtype, self.device.name, self.limits, self.device.num_threads, self.kernels
        )
        if declared.states and (config.spec_method or config.kv_connectors):
            reason = (
                "the model has layers with states, which cannot be taken back after drafts and "
                "are not transferred"
            )
            raise ConfigError(f"{reason}; remove spec_method and kv_connectors")
        every = (config.mamba_block_size or STATE_EVERY) if config.enable_prefix_caching else 0
        states = {
            index: KVCacheSpec(
                tensors=tensors, retain=State(checkpoint_every=every), unit="request"
            )
            for index, tensors in declared.states.items()
        }
        self.attention = AttentionGroups(
            self.registry,
            declared.attention,
            self.build.quantization,
            need,
            setup,
            config.attention_backend,
            states,
        )
        self.declared = {
            layer: layer.declare(self.plan.checkpoint.tensors) for layer in declared.layers
        }

    def _build_model(self) -> None:
        config = self.config
        checkpoint = self.plan.checkpoint
        quantization = self._quantization(checkpoint.quantization or {}, config.quantization)
        plain_name = default_name("quantization")
        is_plain = not checkpoint.quantization and config.quantization in (None, plain_name)
        plain = quantization if is_plain else self._quantization({}, plain_name)
        lora_dtype = config.dtype if config.lora_dtype == "auto" else config.lora_dtype
        self.build = Build(
            dtype=config.dtype,
            device=self.device.name,
            quantization=quantization,
            plain=plain,
            kernels=self.kernels,
            rope_style=checkpoint.rope_style,
            max_positions=self.limits.max_model_len,
            lora=LoRALimits(config.max_loras, config.max_lora_rank, lora_dtype)
            if config.max_loras
            else None,
            lora_rows=lambda: self._adapter_rows(False),
            lora_head_rows=lambda: self._adapter_rows(True),
        )
        need = Need(platform=self.platform_name)
        self.model_entry = self.registry.choose(
            "model", need, keys=checkpoint.architectures
        ).require()
        implementation = self.registry.load(self.model_entry)
        self.model = self.registry.checked(
            self.model_entry, implementation(checkpoint.config, self.build), None
        )

    def _quantization(self, stored: Any, asked: str | None) -> Any:
        """Return the quantization method that the checkpoint names, or the user's choice for a
        plain checkpoint."""
        name = asked or stored.get("quant_method") or default_name("quantization")
        need = QuantizationNeed(platform=self.platform_name, dtype=self.config.dtype)
        entry = self.registry.choose(
            "quantization", need, explicit=str(name), key=str(name)
        ).require()
        setup = QuantizationSetup(
            config=stored,
            dtype=self.config.dtype,
            device=self.device.name,
            kernels=self.kernels,
            repack_cache=repack_cache(self.config, self.plan.checkpoint),
        )
        return self.registry.build(entry, setup)

    def _kv_memory_bytes(self, specs: Mapping[int, KVCacheSpec]) -> int:
        """Return the bytes for the KV cache that the user or the platform has set. If none is set,
        run the largest step to measure its memory, and return what is left of the device's
        share."""
        if self.config.kv_cache_memory_bytes is not None:
            return self.config.kv_cache_memory_bytes
        plan = memory.null_plan(specs, self.limits.block_size)
        self.runner = ModelRunner(self._parts(plan, memory.allocate(plan, self.platform.zeros)))
        self.platform.memory(reset_peak=True)
        with checked(self):
            self.runner.run(memory.largest_batch(self.limits, len(plan.groups)))()
        self.runner = None
        numbers = self.platform.memory()
        others = numbers.total_bytes - numbers.free_bytes - numbers.used_bytes
        return max(
            0,
            int(numbers.total_bytes * self.config.gpu_memory_utilization)
            - others
            - numbers.peak_bytes,
        )

    def _calculate_kv_scales(self, specs: Mapping[int, KVCacheSpec]) -> None:
        """Set the scales of the KV cache by a prompt of random tokens."""
        if all(layer.k_scale is None for layer in self.attention.layers.values()):
            log.warning(
                "calculate_kv_scales has no effect: the KV cache does not store 8-bit floats"
            )
            return
        plan, prompt = memory.random_prompt(specs, self.limits)
        self.runner = ModelRunner(self._parts(plan, memory.allocate(plan, self.platform.zeros)))
        self.build.attention.update(self.attention.setting_scales(self.build.attention))
        with checked(self):
            self.runner.run(prompt)()
        self.runner = None

    def allocate(self, kv_plan: KVPlan) -> None:
        """Take the KV memory, bind every layer and make the runner. Earlier recordings are
        discarded."""
        if self.replay is not None:
            self.replay.reset()
        views = memory.allocate(kv_plan, self.platform.zeros, self.platform.memory().total_bytes)
        parts = self._parts(kv_plan, views)
        parts.draft = self._draft()
        parts.connectors = self._connectors(kv_plan, views)
        self.runner = ModelRunner(parts)

    def _parts(self, kv_plan: KVPlan, views: Mapping[int, Mapping[str, Any]]) -> RunnerParts:
        """Bind every layer to this KV memory. Returns the parts of a runner on it."""
        self.build.attention.update(self.attention.attach(kv_plan, views))
        bind_layers(self.build.declared.layers)
        return RunnerParts(
            model=self.model,
            backends=self.attention.backends,
            plan=kv_plan,
            views=views,
            sampler=self._sampler(),
            device=self.device.name,
            limits=self.limits,
            copies=self.platform.copies(),
            pooler=self._pooler(),
            traits=STAGES_OF[self.plan.pooling.task if self.plan.pooling else None],
        )

    def _sampler(self) -> Sampler:
        config = self.config
        processors = []
        shown = LogitsProcessorSetup(self.limits, self.device.name, self._vocabulary)
        for name in config.logits_processors or ():
            chosen = self.registry.choose(
                "logits_processor", Need(), explicit=name, key=name
            ).require()
            processors.append(self.registry.build(chosen, shown))
        setup = SamplerSetup(
            limits=self.limits,
            device=self.device.name,
            seed=config.seed,
            logprobs_mode=config.logprobs_mode,
            processors=tuple(processors),
            kernels=self.kernels,
            copies=self.platform.copies(),
        )
        return self.registry.build(self.sampler_entry, setup)

    def _pooler(self) -> Pooler | None:
        if (pooling := self.plan.pooling) is None:
            return None
        entry = self.registry.choose("pooler", Need(), explicit=pooling.pooler).require()
        return self.registry.build(entry, PoolerSetup(pooling))

    def _draft(self) -> DraftProposer | None:
        if self.config.spec_method is None:
            return None
        need = DraftNeed(platform=self.platform_name, max_drafts=self.config.spec_tokens)
        entry = self.registry.choose("draft", need, explicit=self.config.spec_method).require()
        setup = DraftSetup(self.limits, self.config.spec_adaptive, self.device.fixed_tokens)
        return self.registry.build(entry, setup)

    def _connectors(self, kv_plan: KVPlan, views: Any) -> dict[str, KVConnectorWorker]:
        """Return the worker halves of the configured KV connectors. A connector's spec names this
        half as `worker`."""
        connectors: dict[str, KVConnectorWorker] = {}
        for name in self.config.kv_connectors or ():
            entry = self.registry.choose("kv_connector", Need(), explicit=name, key=name).require()
            spec = self.registry.spec(entry)
            assert isinstance(spec, KVConnectorSpec)
            half = import_part(entry, spec.worker, "worker")
            options = self.registry.options(entry)
            with blame(entry.id):
                built = half(options, KVConnectorSetup(kv_plan, self.rank))
                connectors[name] = self.registry.checked(entry, built, None, "worker")
                connectors[name].register(views, kv_plan.groups)
        return connectors

    def warm_up(self) -> None:
        """Run one step of every kind, in which what plugins return is checked, record what the
        model computes, and run the steps again. A stage that cannot be recorded runs eagerly, and
        the log says why. A model that cannot run is an error here and not at the first request."""
        self.replay = (
            None if self.config.enforce_eager else self.platform.replay(self.kernels.replay)
        )
        with checked(self):
            self._try_steps()
        with blame(self.model_entry.id, self.registry.modules):
            self._record()
            if self.replay is not None:
                self._try_steps()
        for view in memory.tensors_of(self.running.parts.views):  # what the trial wrote
            view[0].zero_()

    def _try_steps(self) -> None:
        for batch in memory.trial_steps(self.limits, len(self.running.parts.plan.groups)):
            self.running.run(batch)()

    def _record(self) -> None:
        if self.replay is None:
            refusals = [
                "every step runs eagerly"
                + (": enforce_eager is set" if self.config.enforce_eager else "")
            ]
        else:
            refusals = self.running.record(
                self.replay, self.attention.not_replayed(self.replay.pads)
            )
        made = self.registry.decisions.get(("kernel", RECORDER)) or Decision(
            "kernel", None, key=RECORDER
        )
        self.registry.record(
            replace(made, notes=tuple(f"not replayed: {refusal}" for refusal in refusals))
        )
        if self.replay is not None and refusals:
            log.info("not replayed: %s", "; ".join(refusals))

    def embedding_size(self) -> int:
        """Return the width of the rows that the model's `embed` returns."""
        return self.running.embedding_size()

    # --- serving ----------------------------------------------------------------------------------

    @property
    def running(self) -> ModelRunner:
        """Return the runner, which exists after `allocate`."""
        assert self.runner is not None, "call allocate() before the first step"
        return self.runner

    def run(self, batch: Batch, masks: Masks | None = None) -> Callable[[], StepOutput]:
        """Run one step. The returned callable waits for its result. The next step may be run before
        that."""
        return self.running.run(batch, masks)

    def call(self, method: str, *args: object) -> object:
        """Run one of START_CALLS, SERVING_CALLS and ENGINE_CALLS."""
        known = START_CALLS | SERVING_CALLS | ENGINE_CALLS
        if method not in known:
            raise ConfigError(
                f"workers have no method {method!r}; known: {', '.join(sorted(known))}"
            )
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

    def _adapter_rows(self, is_head: bool) -> AdapterRows | None:
        if self.runner is None or not (inputs := self.runner.inputs).has_adapters:
            return None
        return (inputs.head_adapters if is_head else inputs.adapters).rows

    @cached_property
    def adapters(self) -> Adapters:
        """The LoRA adapters that this rank keeps in memory."""
        return Adapters(self.build.declared.layers, self._read_adapter)

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

    def _read_adapter(self, adapter: LoRARequest) -> Any:
        """Read an adapter with the first weight loader that reads adapters in files like those in
        its folder."""
        folder = Path(adapter.lora_path)
        for entry in self.registry.entries("weight_loader"):
            spec = self.registry.spec(entry)
            assert isinstance(spec, WeightLoaderSpec)
            if spec.adapters is not None and any(
                next(folder.glob(pattern), None) for pattern in spec.file_patterns
            ):
                return import_part(entry, spec.adapters, "adapters")(folder, self.plan.checkpoint)
        message = (
            "no installed weight loader reads the adapter in"
            if folder.is_dir()
            else "there is no folder"
        )
        raise ModelError(f"{message} {folder}")

    def sleep(self, level: int) -> None:
        """Release the memory of the KV cache and of the weights. level 1: the weights are saved; 2:
        they are read again."""
        release = getattr(self.platform, "release", None)
        if release is None:
            raise ConfigError(
                f"the platform {self.platform_name} cannot release memory; level 0 pauses the "
                "engine and keeps it"
            )
        weights = WeightMemory(
            self.build.declared.layers, release, partial(self._fill, self.plan.checkpoint)
        )
        weights.sleep(level)
        self.asleep = {
            "weights": weights.wake_up,
            "kv_cache": release(memory.tensors_of(self.running.parts.views), keep=False),
        }

    def wake_up(self, tags: list[str]) -> None:
        """Take the memory of these parts again, "weights" or "kv_cache". The KV cache is zero."""
        for tag in tags:
            self.asleep[tag]()

    def _fill(self, checkpoint: Checkpoint, *, only_finite: bool = False) -> None:
        fill_layers(self.declared, self._loader(checkpoint), checkpoint, only_finite=only_finite)

    def update_weights(self, checkpoint: Checkpoint) -> None:
        """Fill the layers from another checkpoint of the same model. If it cannot be read or has
        values that are not finite, they are filled from the last one again. Raises ModelError, and
        EngineDeadError if the last one cannot be read either."""
        check_tensors(self.declared, checkpoint)
        fill_or_restore(
            lambda new: self._fill(new, only_finite=new is checkpoint),
            checkpoint,
            self.plan.checkpoint,
        )
        self.plan = replace(self.plan, checkpoint=checkpoint)

    def profile(self, path: str | None) -> None:
        """Start the profiler, which writes below `path`. If `path` is None, stop it."""
        self.platform.profile(Path(path) if path else None)

    def memory(self) -> dict[str, int]:
        """Return the platform's numbers, in bytes."""
        numbers = self.platform.memory()
        return {
            "free": numbers.free_bytes,
            "total": numbers.total_bytes,
            "used": numbers.used_bytes,
            "peak": numbers.peak_bytes,
        }

    def stop(self) -> None:
        """Close the connectors and forget everything, for good. What the model and the KV cache
        took of the device is given back at once, because another engine may start there."""
        if "adapters" in vars(self):
            self.adapters.close()
        for connector in self.runner.parts.connectors.values() if self.runner is not None else ():
            connector.close()
        if self.replay is not None:
            self.replay.reset()
        platform = vars(self).get("platform")
        vars(self).clear()
        if platform is not None:
            platform.memory(reset_peak=True)
