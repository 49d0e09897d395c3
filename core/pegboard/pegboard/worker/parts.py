"""What a worker builds its models from, and its parts beside them: each is built by the plugin that
is chosen for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pegboard.config.data_parallel import engine_number, local_engine, local_engines
from pegboard.config.limits import Limits
from pegboard.config.schema import EngineConfig, eplb_config
from pegboard.data.pooling_params import Pooling
from pegboard.errors import ConfigError, blame, expect
from pegboard.installed import Entry
from pegboard.interfaces.attention import KVPlan
from pegboard.interfaces.collective import Collective, CollectiveNeed, CollectiveSetup
from pegboard.interfaces.draft import DraftNeed, DraftProposer, DraftSetup, Forwards
from pegboard.interfaces.executor import Place
from pegboard.interfaces.kernel import KernelNeed
from pegboard.interfaces.kv_connector import KVConnectorSetup, KVConnectorSpec, KVConnectorWorker
from pegboard.interfaces.logits_processor import LogitsProcessorSetup
from pegboard.interfaces.platform import Device, Platform, PlatformSetup
from pegboard.interfaces.pooler import Pooler, PoolerSetup
from pegboard.interfaces.sampler import Sampler, SamplerSetup
from pegboard.interfaces.spec import Need
from pegboard.layers.build import LoRALimits
from pegboard.layers.engine_rows import EngineRows
from pegboard.layers.shards import Group, Stage
from pegboard.plugins.defaults import default_name
from pegboard.plugins.importing import import_part
from pegboard.plugins.registry import Registry
from pegboard.worker.context import Context, Rows, check_context
from pegboard.worker.kernels import Kernels, choose_kernels
from pegboard.worker.recordings import mode_of

if TYPE_CHECKING:
    from pegboard.interfaces.tokenizer import Vocabulary

TIMEOUT_S = 300.0
"""How long a rank waits for the others, in seconds: longer than any step takes."""


@dataclass(frozen=True)
class Ranks:
    """How a rank is connected to the others. tensor: those that divide the layers of its stage.
    context: those that share out the tokens of the KV cache. engines: those that share out experts
    with other engines; None = this engine has all experts.
    before, after: this rank with the one that holds the same share of the stage before it, and of
    the one after it. They are None if there is no such stage, or if nothing is computed."""

    tensor: Group = Group()
    stage: Stage = Stage()
    context: Context = Context()
    before: Collective | None = None
    after: Collective | None = None
    engines: EngineRows | None = None

    def layout(self) -> str:
        """Return what the ranks divide, in words."""
        tensor = self.tensor
        sizes = f"tensor_parallel_size={tensor.size}, pipeline_parallel_size={self.stage.count}"
        if (copies := self.context.rows.group.size) > 1:
            sizes += f", prefill_context_parallel_size={copies}"
        return f"{sizes}, experts {tensor.placement}" if tensor.shares_out_experts else sizes

    def close(self) -> None:
        context = self.context
        groups = [self.tensor, context.tokens, context.heads, context.rows.group]
        if (engines := self.engines) is not None:
            groups += (engines.experts, engines.engines)
        for collective in (self.before, self.after, *(group.collective for group in groups)):
            if collective is not None:
                collective.close()


@dataclass(frozen=True)
class WorkerSetup:
    """What all models and parts of a worker have in common. platform_name: the name of the
    platform's plugin. kernels: op or weight format → implementation. activations: torch name of the
    type that is computed in between the products with weights, which `config.dtype` is the type
    of."""

    registry: Registry
    config: EngineConfig
    limits: Limits
    place: Place
    platform_name: str
    platform: Platform
    device: Device
    kernels: Kernels
    activations: str
    ranks: Ranks


def take_device(
    registry: Registry, config: EngineConfig, limits: Limits, place: Place, meeting: str = ""
) -> WorkerSetup:
    """Take the device of a rank, and choose its kernels. meeting: see `WorkerPlan`. Raises
    ConfigError or PluginError."""
    check_context(config, limits.block_size)
    entry = registry.choose("platform", Need(), explicit=config.device).require()
    local_ranks = place.local_ranks * local_engines(config)
    local_rank = place.local_ranks * local_engine(config) + place.local_rank
    platform = registry.build(entry, PlatformSetup(config.num_threads, local_ranks))
    device = expect(platform.start(local_rank), Device, platform, "start")
    activations = device.activations or config.dtype
    need = KernelNeed(
        platform=entry.name, dtype=activations, batch_invariant=config.batch_invariant
    )
    kernels = choose_kernels(registry, need)
    if config.recording_mode is not None:
        mode_of(config.recording_mode, platform.replay(kernels.replay))
    ranks = make_ranks(registry, config, place, entry.name, device)
    if config.expert_engines > 1:
        engines = join_engines(registry, config, place, entry.name, device, meeting)
        ranks = replace(ranks, engines=engines)
    return WorkerSetup(
        registry, config, limits, place, entry.name, platform, device, kernels, activations, ranks
    )


def lora_limits(config: EngineConfig) -> LoRALimits | None:
    """Return the limits of adapters; None = there are none."""
    if not config.max_loras:
        return None
    dtype = config.dtype if config.lora_dtype == "auto" else config.lora_dtype
    return LoRALimits(config.max_loras, config.max_lora_rank, dtype, config.fully_sharded_loras)


def make_ranks(
    registry: Registry, config: EngineConfig, place: Place, platform: str, device: Device
) -> Ranks:
    """Return the ranks of this rank's groups, connected to each other if they run at all."""
    if config.num_ranks == 1:
        return groups_of(config, 0, lambda group, ranks: None)
    hosts = -(-place.ranks // place.local_ranks)
    need = CollectiveNeed(platform=platform, hosts=hosts, batch_invariant=config.batch_invariant)
    entry = registry.choose("collective", need).require()

    def connect(group: str, ranks: Sequence[int]) -> Collective | None:
        if not place.address:
            return None
        member = ranks.index(place.rank)
        setup = CollectiveSetup(group, tuple(ranks), member, place.address, device.name, TIMEOUT_S)
        collective: Collective = registry.build(entry, setup)
        return collective

    return groups_of(config, place.rank, connect)


def join_engines(
    registry: Registry,
    config: EngineConfig,
    place: Place,
    platform: str,
    device: Device,
    meeting: str,
) -> EngineRows:
    """Return the groups of this rank and those of other engines. meeting: where they meet; "" =
    nothing is computed. Raises ConfigError if the ranks are on several hosts."""
    if place.local_ranks < place.ranks:
        raise ConfigError(
            "engines that share out experts must be on one host, but the ranks of this one are on "
            "several; remove enable_expert_parallel, or use an executor of one host"
        )
    need = CollectiveNeed(
        platform=platform,
        hosts=2 if meeting.startswith("tcp:") else None,
        batch_invariant=config.batch_invariant,
    )
    entry = registry.choose("collective", need).require()
    size = config.num_ranks
    every = range(config.expert_engines * size)
    rank = engine_number(config) * size + place.rank

    def group(name: str, ranks: range) -> Group:
        member = ranks.index(rank)
        if not meeting:
            return Group(member, len(ranks))
        setup = CollectiveSetup(name, tuple(ranks), member, meeting, device.name, TIMEOUT_S)
        return Group(member, len(ranks), registry.build(entry, setup))

    experts = replace(group("experts", every), placement=config.expert_placement_strategy)
    engines = experts if size == 1 else group("engines", every[place.rank :: size])
    return EngineRows(experts, engines, device.name)


def groups_of(
    config: EngineConfig, rank: int, connect: Callable[[str, Sequence[int]], Collective | None]
) -> Ranks:
    """Return the groups that a rank is in. The ranks of a stage have consecutive numbers, and so
    have those of a tensor group. connect: gets the name of a group and its ranks; None = nothing is
    computed."""
    size = config.tensor_parallel_size
    of_stage = config.ranks_of_stage
    number, member = divmod(rank, of_stage)
    stage = Stage(number, config.pipeline_parallel_size)

    shared = config.decode_context_parallel_size

    def group(name: str, ranks: Sequence[int]) -> Group:
        collective = None if len(ranks) == 1 else connect(name, ranks)
        return Group(ranks.index(rank), len(ranks), collective)

    # all ranks make their groups in this order
    before = (
        None if stage.is_first else connect("stages", range(rank - of_stage, rank + 1, of_stage))
    )
    after = None if stage.is_last else connect("stages", range(rank, rank + of_stage + 1, of_stage))
    tensor = group("tensor", range(rank - member % size, rank - member % size + size))
    heads = range(rank - member % shared, rank - member % shared + shared)
    start = number * of_stage
    rows = range(start + member % size, start + of_stage, size)
    tokens = [row + head - rank for row in rows for head in heads]
    context = Context(
        group("tokens", tokens),
        group("heads", heads),
        Rows(group("rows", rows)),
        config.cp_kv_cache_interleave_size,
    )
    placement = config.expert_placement_strategy if config.enable_expert_parallel else None
    eplb = eplb_config(config)
    redundant = None if eplb is None else eplb.num_redundant_experts
    tensor = replace(tensor, placement=placement, redundant=redundant, same_keys=shared)
    return Ranks(tensor, stage, context, before, after)


def choose_sampler(setup: WorkerSetup) -> Entry:
    """Return the sampler's entry."""
    name = setup.config.sampler or default_name("sampler")
    need = Need(platform=setup.platform_name, batch_invariant=setup.config.batch_invariant)
    return setup.registry.choose("sampler", need, explicit=name).require()


def make_sampler(setup: WorkerSetup, vocabulary: Callable[[], Vocabulary]) -> Sampler:
    """Build the sampler with the configured logits processors."""
    config = setup.config
    processors = []
    shown = LogitsProcessorSetup(setup.limits, setup.device.name, vocabulary)
    for name in config.logits_processors or ():
        chosen = setup.registry.choose("logits_processor", Need(), explicit=name, key=name)
        processors.append(setup.registry.build(chosen.require(), shown))
    sampler_setup = SamplerSetup(
        limits=setup.limits,
        device=setup.device.name,
        seed=config.seed,
        logprobs_mode=config.logprobs_mode,
        processors=tuple(processors),
        kernels=setup.kernels,
        copies=setup.platform.copies(),
    )
    return setup.registry.build(choose_sampler(setup), sampler_setup)


def make_pooler(
    setup: WorkerSetup, pooling: Pooling | None, vocabulary: Callable[[], Vocabulary]
) -> Pooler | None:
    """Build the pooler of a pooling model."""
    if pooling is None:
        return None
    decision = setup.registry.choose("pooler", Need(), explicit=pooling.pooler)
    pooler_setup = PoolerSetup(pooling, setup.platform.copies(), vocabulary)
    return setup.registry.build(decision.require(), pooler_setup)


def choose_draft(setup: WorkerSetup) -> Entry | None:
    """Return the entry of the configured draft plugin."""
    config = setup.config
    if config.spec_method is None:
        return None
    need = DraftNeed(platform=setup.platform_name, max_drafts=config.spec_tokens)
    return setup.registry.choose("draft", need, explicit=config.spec_method).require()


def proposer_of(
    setup: WorkerSetup, sampler: Sampler
) -> Callable[[Forwards | None], DraftProposer] | None:
    """Return what builds the configured draft plugin, from the forwards of its model."""
    config = setup.config
    entry = choose_draft(setup)
    if entry is None:
        return None

    def build(forwards: Forwards | None) -> DraftProposer:
        proposer: DraftProposer = setup.registry.build(
            entry,
            DraftSetup(
                setup.limits,
                config.spec_adaptive,
                setup.device.fixed_tokens,
                forwards,
                getattr(sampler, "draw_drafts", None),
                measures=config.num_ranks == 1,
            ),
        )
        return proposer

    return build


def make_connectors(
    setup: WorkerSetup, kv_plan: KVPlan, views: Any
) -> dict[str, KVConnectorWorker]:
    """Build the worker halves of the configured KV connectors. A connector's spec names this half
    as `worker`."""
    registry = setup.registry
    connectors: dict[str, KVConnectorWorker] = {}
    place = setup.place
    number = engine_number(setup.config) * place.ranks + place.rank
    for name in setup.config.kv_connectors or ():
        entry = registry.choose("kv_connector", Need(), explicit=name, key=name).require()
        spec = registry.spec(entry)
        assert isinstance(spec, KVConnectorSpec)
        half = import_part(entry, spec.worker, "worker")
        options = registry.options(entry)
        with blame(entry.id):
            copies = setup.platform.copies()
            built = half(options, KVConnectorSetup(kv_plan, place.rank, number, copies=copies))
            connectors[name] = registry.checked(entry, built, None, "worker")
            connectors[name].register(views, kv_plan.groups)
    return connectors
