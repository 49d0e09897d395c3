"""Builds an engine from its plan: platform defaults, executor, workers, KV cache and policy.
Imports torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pegboard.config.data_parallel import engine_number
from pegboard.config.limits import AUTO_LEN, NO_LIMIT, Limits
from pegboard.config.schema import EngineConfig, structured_outputs_config
from pegboard.engine.boundary.spawn import Child
from pegboard.engine.engine import Engine, EngineParts
from pegboard.engine.executors import (
    SPEEDS_DIFFER,
    check_agreement,
    choose_executor,
    engine_host,
)
from pegboard.engine.grammar.compiler import GrammarCompiler
from pegboard.engine.grammar.grammars import Grammars
from pegboard.engine.kv.events import KVEvents
from pegboard.engine.kv.identity import identified
from pegboard.engine.kv.plan import capacity, fit_kv
from pegboard.engine.kv.special_rules import make_rule
from pegboard.engine.metrics.step import StepMetrics
from pegboard.engine.platform_defaults import with_platform_defaults
from pegboard.env import compute_threads
from pegboard.errors import blame, expect
from pegboard.interfaces.attention import KVCacheSpec, KVPlan
from pegboard.interfaces.executor import ExecutorSetup, Place
from pegboard.interfaces.hooks import LoadedModel
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard.interfaces.scheduling_policy import SchedulingPolicySetup
from pegboard.interfaces.spec import Need
from pegboard.interfaces.structured_output import StructuredOutputNeed, StructuredOutputSetup
from pegboard.log import get_logger
from pegboard.plan.draft import draft_len, draft_spec
from pegboard.plan.engine_plan import EnginePlan, read_vocabulary
from pegboard.plan.sinks import build_sinks, metrics_flags
from pegboard.plan.weight_update import describe_update
from pegboard.plugins.defaults import default_name
from pegboard.plugins.hooks import Hooks
from pegboard.plugins.hosts import check_same_plugins, plugin_versions
from pegboard.plugins.registry import Registry
from pegboard.worker.extension import make_worker
from pegboard.worker.model_loader import check_tensors
from pegboard.worker.worker import Worker, WorkerPlan

log = get_logger(__name__)

MAX_FILL_THREADS = 4
"""The number of threads that fill token masks. This is little work, and more threads would cost
more than they save."""


def build_engine(plan: EnginePlan, *, in_program: bool = False) -> Engine:
    """Load the model and return an engine that is ready to step. in_program: only the program that
    calls this gives it requests. Raises ConfigError, ModelError or PluginError."""
    registry = Registry.from_lock(plan.lock)
    with blame(None, registry.modules):
        return _build(registry, plan, in_program)


def _build(registry: Registry, plan: EnginePlan, in_program: bool) -> Engine:
    started = time.perf_counter()
    config = with_platform_defaults(registry, plan)
    limits = _limits(plan, config, registry)
    policy, has_priority = _policy(registry, config, limits)
    entry = choose_executor(registry, config)
    absence = ""
    if "engine_per_rank" in registry.spec(entry).flags:
        check_agreement(entry.name, config, in_program)
        absence = f"is not possible with the executor {entry.name}: {SPEEDS_DIFFER}"
    executor = registry.build(entry, _executor_setup(registry, plan, config, limits))
    ready = expect(executor.start(), list, executor, "start")
    loaded = time.perf_counter()
    kv_bytes = min(rank.kv_memory_bytes for rank in ready)
    numbers = executor.call("memory")
    room_bytes = min(_room_bytes(config, rank["total"], rank["free"]) for rank in numbers)
    # no rank of a stage stores more than its first one
    stages = ready[:: config.ranks_of_stage]
    specs = [rank.kv_specs for rank in stages]
    kv_plan, limits = _fit_kv(plan, config, limits, specs, kv_bytes, room_bytes)
    limits = replace(limits, drafts_ahead=all(rank.drafts_ahead for rank in ready))
    layouts = [rank.kv_layout for rank in stages]
    kv_plan = identified(kv_plan, plan, config, layouts)
    executor.call("allocate", kv_plan)
    for decision in executor.call("warm_up")[0]:  # ranks choose alike
        registry.record(decision)
    log.info(
        "model %s: %s, loaded in %.1f s",
        plan.model_names[0],
        ", ".join(plan.checkpoint.architectures),
        loaded - started,
    )
    log.info("device %s: computes with weights of %s", config.device, config.dtype)
    size = kv_plan.num_blocks * kv_plan.block_bytes / 2**30
    stored = "+".join(
        sorted({tensor.dtype for group in kv_plan.groups for tensor in group.spec.tensors})
    )
    where = (
        f" in {kv_plan.num_blocks} blocks ({size:.2f} GiB), stored in {stored}" if stored else ""
    )
    log.info("KV cache: %s%s", capacity(kv_plan), where)
    _tell_hooks(registry, plan, sum(rank.weight_bytes for rank in ready), loaded - started)
    events = KVEvents(kv_plan) if "kv_events" in metrics_flags(registry) else None
    parts = EngineParts(
        executor=executor,
        policy=policy,
        has_priority=has_priority,
        kv_events=events,
        kv_plan=kv_plan,
        limits=limits,
        connectors=_connectors(registry, config, kv_plan, events),
        grammars=make_grammars(registry, plan, absence=absence),
        metrics=_metrics(registry, plan, config, limits, kv_plan),
        modules=registry.modules(),
        decisions=registry.describe_decisions,
        can_sleep=config.enable_sleep_mode,
        describe_update=partial(describe_update, registry, plan),
        embedding_size=executor.call("embedding_size")[0]
        if config.enable_prompt_embeds or config.enable_mm_embeds
        else 0,
    )
    return Engine(parts)


def _fit_kv(
    plan: EnginePlan,
    config: EngineConfig,
    limits: Limits,
    stages: Sequence[Mapping[int, KVCacheSpec]],
    kv_bytes: int,
    room_bytes: int,
) -> tuple[KVPlan, Limits]:
    """Divide the KV cache. stages: what each pipeline stage stores. A size that is only the
    platform's default may grow to `room_bytes`, if the model's context needs it. One that was
    measured takes all that there is."""
    settings = plan.settings.engine
    is_default = config.kv_cache_memory_bytes is not None and settings.kv_cache_memory_bytes is None
    kv_plan, fitting = fit_kv(
        {layer: spec for specs in stages for layer, spec in specs.items()},
        kv_bytes,
        limits,
        stages=stages,
        room_bytes=room_bytes if is_default else 0,
        shorten=settings.max_model_len in AUTO_LEN,
        num_blocks_override=config.num_gpu_blocks_override,
        whole_prompts=plan.pooling is not None and not config.enable_chunked_prefill,
    )
    if fitting != limits:
        log.warning(
            "max_model_len is %d, which fits the KV cache, instead of %d",
            fitting.max_model_len,
            limits.max_model_len,
        )
    return kv_plan, fitting


def _room_bytes(config: EngineConfig, total_bytes: int, free_bytes: int) -> int:
    """Return how much of the free memory the KV cache may take: all but the share that stays free
    for others."""
    return max(0, free_bytes - int(total_bytes * (1 - config.gpu_memory_utilization)))


def choose_for_model(
    plan: EnginePlan, registry: Registry, num_weight_bytes: int = 0
) -> tuple[KVPlan, Limits, set[str]]:
    """Make every choice of an engine, and record it in `registry`. The model is built without its
    weights, and the memory that they would leave free is divided. Return the plan of the KV cache,
    the limits, and the names of the tensors that the model reads. Raises ConfigError, ModelError or
    PluginError if the model cannot run."""
    config = with_platform_defaults(registry, plan)
    limits = _limits(plan, config, registry)
    _policy(registry, config, limits)
    choose_executor(registry, config)
    ranks = config.num_ranks
    names: set[str] = set()
    stages = []
    for rank in range(0, ranks, config.ranks_of_stage):
        place = Place(rank, ranks, rank, ranks)
        worker = Worker(registry, _worker_plan(registry, plan, config, limits), place)
        worker.declare()
        for model in worker.models:
            check_tensors(model.declared, model.checkpoint)
        target = worker.models[0].declared
        names |= {weight.name for weights in target.values() for weight in weights}
        stages.append({i: spec for model in worker.models for i, spec in model.kv_specs().items()})
    memory = worker.setup.platform.memory()
    room_bytes = _room_bytes(
        config, memory.total_bytes, memory.free_bytes - num_weight_bytes // ranks
    )
    kv_bytes = room_bytes if config.kv_cache_memory_bytes is None else config.kv_cache_memory_bytes
    return *_fit_kv(plan, config, limits, stages, kv_bytes, room_bytes), names


def _worker_plan(
    registry: Registry, plan: EnginePlan, config: EngineConfig, limits: Limits
) -> WorkerPlan:
    return WorkerPlan(
        config,
        limits,
        plan.checkpoint,
        partial(read_vocabulary, registry, plan),
        plan.pooling,
        plan.meeting,
        plan.draft,
    )


def _tell_hooks(registry: Registry, plan: EnginePlan, weight_bytes: int, load_s: float) -> None:
    if registry.enabled_hooks():
        architecture = plan.checkpoint.architectures[0] if plan.checkpoint.architectures else ""
        num_layers = plan.checkpoint.config.get("num_hidden_layers", 0)
        model = LoadedModel(plan.model_names[0], architecture, num_layers, weight_bytes, load_s)
        Hooks(registry).call("pegboard_model_loaded", model)


def _executor_setup(
    registry: Registry, plan: EnginePlan, config: EngineConfig, limits: Limits
) -> ExecutorSetup:
    ranks = config.num_ranks
    worker_plan = _worker_plan(registry, plan, config, limits)
    last_stage = range(ranks - config.ranks_of_stage, ranks)
    return ExecutorSetup(
        partial(make_worker, registry, worker_plan),
        ranks,
        Child,
        last_stage,
        partial(check_same_plugins, plugin_versions(registry)),
        config.device,
        config.num_threads,
        engine_host(config),
    )


def _policy(registry: Registry, config: EngineConfig, limits: Limits) -> tuple[Any, bool]:
    """Return the scheduling policy, and whether it honours priorities."""
    name = config.scheduling_policy or default_name("scheduling_policy")
    entry = registry.choose("scheduling_policy", Need(), explicit=name).require()
    return registry.build(entry, SchedulingPolicySetup(limits)), "priority" in registry.spec(
        entry
    ).flags


def _limits(plan: EnginePlan, config: EngineConfig, registry: Registry) -> Limits:
    """Return the limits of the engine. This function alone decides what an unset setting means,
    after the platform has filled in its defaults."""
    assert config.max_num_seqs and config.max_num_batched_tokens and config.block_size
    draft = draft_spec(registry, config)
    return Limits(
        max_model_len=plan.max_model_len,
        vocab_size=plan.vocab_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold or NO_LIMIT,
        max_num_partial_prefills=config.max_num_partial_prefills,
        max_long_partial_prefills=config.max_long_partial_prefills,
        target_itl_s=(config.target_itl_ms or 0.0) / 1000,
        max_in_flight=_max_in_flight(config, registry),
        max_num_queued_reqs=config.max_num_queued_reqs or NO_LIMIT,
        enable_prefix_caching=config.enable_prefix_caching,
        hash_algo=config.prefix_caching_hash_algo,
        max_drafts=config.spec_tokens,
        max_draft_rows=config.spec_max_rows or NO_LIMIT,
        max_draft_len=draft_len(config, plan.draft),
        stored_drafts=config.spec_tokens if draft is not None and "stores" in draft.flags else 0,
        max_loras=config.max_loras,
        max_cpu_loras=config.max_cpu_loras or config.max_loras,
        kv_load_failure_policy=config.kv_load_failure_policy,
        kv_metrics_share=config.kv_cache_metrics_sample if config.kv_cache_metrics else 0.0,
        num_stages=config.pipeline_parallel_size,
        in_lockstep=config.expert_engines > 1,
        max_num_encoder_input_tokens=0
        if plan.multimodal_processor is None
        else config.max_num_encoder_input_tokens or config.max_num_batched_tokens,
        encoder_cache_size=config.encoder_cache_size,
        disable_chunked_mm_input=config.disable_chunked_mm_input,
        whole=plan.whole,
    )


def _connectors(
    registry: Registry, config: EngineConfig, kv_plan: KVPlan, events: KVEvents | None
) -> dict[str, Any]:
    """Return the scheduler halves of the configured connectors, in order."""
    connectors = {}
    expired = [make_rule(group, kv_plan.hash_block_size).unneeded for group in kv_plan.groups]
    number = engine_number(config) * config.num_ranks
    for name in config.kv_connectors or ():
        entry = registry.choose("kv_connector", Need(), explicit=name, key=name).require()
        setup = KVConnectorSetup(
            kv_plan, number=number, expired=expired, events=events.of if events else None
        )
        connectors[name] = registry.build(entry, setup)
    return connectors


def make_grammars(registry: Registry, plan: EnginePlan, *, absence: str = "") -> Grammars:
    """Return the grammars of an engine. They have no backend if there is no plugin or no tokenizer,
    or for the reason `absence`. Nothing is read or compiled before the first constraint arrives."""
    setup = structured_output_setup(registry, plan)
    plugins = [] if absence else _structured_output_plugins(registry, plan.settings.engine)
    entries = {entry.name: entry for entry in plugins}
    chain = {name: registry.build(entry, setup) for name, entry in entries.items()}
    return Grammars(
        GrammarCompiler(chain, blaming=lambda name: blame(entries[name].id, registry.modules)),
        vocab_size=plan.vocab_size,
        config=structured_outputs_config(plan.settings.engine),
        token_bytes=lambda: setup.vocabulary.token_bytes,
        absence=absence,
    )


def structured_output_setup(registry: Registry, plan: EnginePlan) -> StructuredOutputSetup:
    """Return the setup that every backend is built with. It reads no files yet."""
    num_threads = min(MAX_FILL_THREADS, plan.settings.engine.num_threads or compute_threads())
    return StructuredOutputSetup(
        plan.vocab_size, partial(read_vocabulary, registry, plan), plan.eos_token_ids, num_threads
    )


def _structured_output_plugins(registry: Registry, engine: EngineConfig) -> list[Any]:
    """Return the plugins to ask, in order. A plugin that was requested by name must support the
    configuration; "auto" leaves out the plugins that do not."""
    if engine.skip_tokenizer_init:
        return []
    config = structured_outputs_config(engine)
    need = StructuredOutputNeed(compact=config.disable_any_whitespace)
    if config.names:
        decisions = [
            registry.choose("structured_output", need, explicit=name, key=name)
            for name in config.names
        ]
        return [decision.require() for decision in decisions]
    decision = registry.choose("structured_output", need, required=False)
    ranked = [
        candidate.entry
        for candidate in decision.candidates
        if candidate.gate in ("selected", "ranked")
    ]
    return ranked[:1] if config.disable_fallback else ranked


def _max_in_flight(config: EngineConfig, registry: Registry) -> int:
    """Return how many steps may be in flight: at least one for each pipeline stage, and one if the
    engine must know after each step whether others need the next one. Otherwise, it is one if a
    logits processor needs each new token on the host; the log says so."""
    wanted = config.max_in_flight or 1
    if config.pipeline_parallel_size > 1:
        return max(wanted, config.pipeline_parallel_size)
    if config.expert_engines > 1:
        return 1
    for name in config.logits_processors or ():
        entry = registry.find("logits_processor", name)
        if wanted > 1 and "host_tokens" in registry.spec(entry).flags:
            log.info(
                "max_in_flight 1 instead of %d: %s needs each token on the host", wanted, entry.id
            )
            return 1
    return wanted


def _metrics(
    registry: Registry, plan: EnginePlan, config: EngineConfig, limits: Limits, kv_plan: KVPlan
) -> StepMetrics:
    chosen: dict[str, set[str]] = {"structured_output": set(registry.names("structured_output"))}
    for decision in registry.decisions.values():
        if decision.winner is not None:
            chosen.setdefault(decision.kind, set()).add(decision.winner.name)
    cache_config = {
        "block_size": config.block_size,
        "cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
        "num_gpu_blocks": kv_plan.num_blocks,
        "num_gpu_blocks_override": config.num_gpu_blocks_override,
        "prefix_caching_hash_algo": config.prefix_caching_hash_algo,
    }
    return StepMetrics(
        limits,
        list(build_sinks(registry, plan.settings.engine, plan.model_names[0], "engine").values()),
        wants_records="requests" in metrics_flags(registry),
        cache_config={name: str(value) for name, value in cache_config.items()},
        plugin_names={kind: "+".join(sorted(names)) for kind, names in chosen.items()},
        show_hidden=config.show_hidden_metrics_for_version,
        modules=registry.modules,
        engine=engine_number(config),
    )
