"""What a worker builds its models from, and its parts beside them: each is built by the plugin that
is chosen for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pegboard.config.data_parallel import local_engine, local_engines
from pegboard.config.limits import Limits
from pegboard.config.schema import EngineConfig
from pegboard.data.pooling_params import Pooling
from pegboard.errors import blame, expect
from pegboard.installed import Entry
from pegboard.interfaces.attention import KVPlan
from pegboard.interfaces.collective import CollectiveNeed, CollectiveSetup
from pegboard.interfaces.draft import DraftNeed, DraftProposer, DraftSetup
from pegboard.interfaces.executor import Place
from pegboard.interfaces.kv_connector import KVConnectorSetup, KVConnectorSpec, KVConnectorWorker
from pegboard.interfaces.logits_processor import LogitsProcessorSetup
from pegboard.interfaces.platform import Device, Platform, PlatformSetup
from pegboard.interfaces.pooler import Pooler, PoolerSetup
from pegboard.interfaces.sampler import Sampler, SamplerSetup
from pegboard.interfaces.spec import Need
from pegboard.layers.shards import Group
from pegboard.plugins.defaults import default_name
from pegboard.plugins.importing import import_part
from pegboard.plugins.registry import Registry
from pegboard.worker.kernels import Kernels, choose_kernels

if TYPE_CHECKING:
    from pegboard.interfaces.tokenizer import Vocabulary

TIMEOUT_S = 300.0
"""How long a rank waits for the others, in seconds: longer than any step takes."""


@dataclass(frozen=True)
class WorkerSetup:
    """What all models and parts of a worker have in common. platform_name: the name of the
    platform's plugin. kernels: op or weight format → implementation. activations: torch name of the
    type that is computed in between the products with weights, which `config.dtype` is the type of.
    tensor: the ranks that divide the layers."""

    registry: Registry
    config: EngineConfig
    limits: Limits
    place: Place
    platform_name: str
    platform: Platform
    device: Device
    kernels: Kernels
    activations: str
    tensor: Group


def take_device(
    registry: Registry, config: EngineConfig, limits: Limits, place: Place
) -> WorkerSetup:
    """Take the device of a rank, and choose its kernels. Raises ConfigError or PluginError."""
    entry = registry.choose("platform", Need(), explicit=config.device).require()
    local_ranks = place.local_ranks * local_engines(config)
    local_rank = place.local_ranks * local_engine(config) + place.local_rank
    platform = registry.build(entry, PlatformSetup(config.num_threads, local_ranks))
    device = expect(platform.start(local_rank), Device, platform, "start")
    activations = device.activations or config.dtype
    kernels = choose_kernels(registry, platform=entry.name, dtype=activations)
    tensor = make_group(registry, config, place, entry.name, device)
    return WorkerSetup(
        registry, config, limits, place, entry.name, platform, device, kernels, activations, tensor
    )


def make_group(
    registry: Registry, config: EngineConfig, place: Place, platform: str, device: Device
) -> Group:
    """Return the ranks that divide the layers, connected to each other if they run at all."""
    size = config.tensor_parallel_size
    if size == 1:
        return Group()
    hosts = -(-place.ranks // place.local_ranks)
    need = CollectiveNeed(platform=platform, hosts=hosts)
    entry = registry.choose("collective", need).require()
    if not place.address:
        return Group(place.rank, size)
    setup = CollectiveSetup(
        "tensor", tuple(range(size)), place.rank, place.address, device.name, TIMEOUT_S
    )
    return Group(place.rank, size, registry.build(entry, setup))


def choose_sampler(setup: WorkerSetup) -> Entry:
    """Return the sampler's entry."""
    name = setup.config.sampler or default_name("sampler")
    need = Need(platform=setup.platform_name)
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


def make_pooler(setup: WorkerSetup, pooling: Pooling | None) -> Pooler | None:
    """Build the pooler of a pooling model."""
    if pooling is None:
        return None
    decision = setup.registry.choose("pooler", Need(), explicit=pooling.pooler)
    return setup.registry.build(decision.require(), PoolerSetup(pooling))


def make_proposer(setup: WorkerSetup) -> DraftProposer | None:
    """Build the configured draft plugin."""
    config = setup.config
    if config.spec_method is None:
        return None
    need = DraftNeed(platform=setup.platform_name, max_drafts=config.spec_tokens)
    decision = setup.registry.choose("draft", need, explicit=config.spec_method)
    draft_setup = DraftSetup(setup.limits, config.spec_adaptive, setup.device.fixed_tokens)
    return setup.registry.build(decision.require(), draft_setup)


def make_connectors(
    setup: WorkerSetup, kv_plan: KVPlan, views: Any
) -> dict[str, KVConnectorWorker]:
    """Build the worker halves of the configured KV connectors. A connector's spec names this half
    as `worker`."""
    registry = setup.registry
    connectors: dict[str, KVConnectorWorker] = {}
    for name in setup.config.kv_connectors or ():
        entry = registry.choose("kv_connector", Need(), explicit=name, key=name).require()
        spec = registry.spec(entry)
        assert isinstance(spec, KVConnectorSpec)
        half = import_part(entry, spec.worker, "worker")
        options = registry.options(entry)
        with blame(entry.id):
            built = half(options, KVConnectorSetup(kv_plan, setup.place.rank))
            connectors[name] = registry.checked(entry, built, None, "worker")
            connectors[name].register(views, kv_plan.groups)
    return connectors
