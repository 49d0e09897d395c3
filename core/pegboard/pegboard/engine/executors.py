"""Which executor runs the ranks, and on which hosts they are."""

from __future__ import annotations

from pegboard.config.schema import EngineConfig
from pegboard.errors import ConfigError
from pegboard.installed import Entry
from pegboard.interfaces.executor import ExecutorNeed, Hosts
from pegboard.plugins.defaults import default_name
from pegboard.plugins.registry import Registry

SPEEDS_DIFFER = "it takes a time that differs between ranks, whose engines would decide differently"

TIMED = ("target_itl_ms", "max_loras", "kv_connectors")


def choose_executor(registry: Registry, config: EngineConfig) -> Entry:
    """Return the executor's entry. Raises ConfigError or PluginError if none can run the ranks."""
    backend = config.distributed_executor_backend
    prefers = [name] if (name := default_name("executor")) else []
    need = ExecutorNeed(
        ranks=config.num_ranks if config.num_ranks > 1 else None,
        hosts=config.nnodes if config.nnodes > 1 else None,
    )
    return registry.choose("executor", need, explicit=backend, prefers=prefers).require()


def check_agreement(executor: str, config: EngineConfig, in_program: bool) -> None:
    """Check an engine that must decide as those of the other ranks do, without asking them. Raises
    ConfigError for settings whose effect depends on time, and unless the program itself gives the
    engine its requests."""
    if not in_program:
        raise ConfigError(
            f"the executor {executor} needs every rank's program to give its engine the same "
            "requests, which only LLM does; use the executor mp for a server and for AsyncLLM"
        )
    timed = [name for name in TIMED if getattr(config, name)]
    if timed:
        raise ConfigError(
            f"{', '.join(timed)}: not possible with the executor {executor}: {SPEEDS_DIFFER}; "
            "remove it, or use the executor mp"
        )


def engine_host(config: EngineConfig) -> Hosts | None:
    """Return the hosts of an engine in this process. None = only this one. Raises ConfigError if
    the engine must be on another one."""
    hosts = hosts_of(config)
    if hosts is not None and hosts.number:
        raise ConfigError(
            f"node_rank is {hosts.number}, but the engine is on the host with node_rank 0; start "
            "the others with pegboard serve --headless"
        )
    return hosts


def hosts_of(config: EngineConfig) -> Hosts | None:
    """Return the hosts of the ranks. None = there is one. Raises ConfigError if the settings do not
    fit together."""
    count = config.nnodes
    number = config.node_rank
    if number >= count:
        raise ConfigError(
            f"node_rank is {number}, expected 0 to {count - 1}, because nnodes is {count}"
        )
    if count == 1:
        return None
    if not 0 < config.master_port < 65535:
        raise ConfigError(f"master_port is {config.master_port}, expected 1 to 65534")
    if config.num_ranks % count:
        raise ConfigError(
            f"nnodes is {count}, but {config.num_ranks} ranks (tensor_parallel_size times "
            f"pipeline_parallel_size) cannot be divided equally among {count} hosts"
        )
    if config.data_parallel_size > 1:
        raise ConfigError(
            "data_parallel_size and nnodes cannot be combined: start a server with nnodes for each "
            "engine, with data_parallel_external_lb, and put a router in front of them"
        )
    return Hosts(count, number, config.master_addr, config.master_port)
