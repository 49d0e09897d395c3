"""The engines of data parallel: which of them a server runs, and their places on its host.

Engines are numbered over all hosts. A server with internal balancing has all of them, of which
other hosts may run the last ones. With hybrid balancing it has those of its host, and with external
balancing one.
"""

from __future__ import annotations

from pegboard.config.schema import EngineConfig
from pegboard.errors import ConfigError, RequestError

ALL2ALL = ("allgather_reducescatter", "naive")

ALONE = {
    "pipeline_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "enable_eplb": False,
    "spec_method": None,
    "spec_model": None,
    "max_loras": 0,
    "enable_sleep_mode": False,
    "kv_connectors": None,
    "calculate_kv_scales": False,
}
"""Settings that engines which share out experts cannot have another value of."""


def engine_numbers(config: EngineConfig) -> range:
    """Return the numbers of this server's engines. Raises ConfigError if the settings about data
    parallel do not fit together."""
    start = config.data_parallel_start_rank or 0
    local = config.data_parallel_size_local
    rank = config.data_parallel_rank
    is_hybrid = config.data_parallel_hybrid_lb or start > 0
    if config.data_parallel_launcher is not None and (rank is not None or is_hybrid):
        raise ConfigError(
            "data_parallel_launcher is for a server with all engines; remove data_parallel_rank, "
            "data_parallel_start_rank and data_parallel_hybrid_lb"
        )
    if config.data_parallel_external_lb and rank is None:
        raise ConfigError(
            "data_parallel_external_lb needs data_parallel_rank, the number of this server's engine"
        )
    if rank is not None:
        if is_hybrid or local not in (None, 1):
            raise ConfigError(
                f"data_parallel_rank is {rank}: this server runs only that engine (external "
                "balancing); leave out data_parallel_size_local, data_parallel_start_rank and "
                "data_parallel_hybrid_lb, or data_parallel_rank"
            )
        return range(rank, rank + 1)
    if is_hybrid:
        if local is None:
            raise ConfigError(
                "hybrid balancing (data_parallel_hybrid_lb, data_parallel_start_rank) needs "
                "data_parallel_size_local, the number of engines on this host"
            )
        return range(start, start + local)
    is_alone = config.data_parallel_address is None and config.data_parallel_launcher is None
    if is_alone and local not in (None, config.data_parallel_size):
        raise ConfigError(
            f"data_parallel_size_local is {local} of {config.data_parallel_size} engines: give the "
            "address of this host with data_parallel_address, and start pegboard serve --headless "
            "on the hosts of the other engines; or set data_parallel_hybrid_lb if each host has a "
            "server, behind a router"
        )
    return range(config.data_parallel_size)


def engines_here(config: EngineConfig) -> range:
    """Return the numbers of this server's engines that run on its host."""
    numbers = engine_numbers(config)
    local = config.data_parallel_size_local
    if config.data_parallel_launcher is not None:
        return numbers[: local or 0]
    return numbers if local is None or config.data_parallel_rank is not None else numbers[:local]


def headless_engines(config: EngineConfig) -> range:
    """Return the numbers of the engines that a host without a server runs. Raises ConfigError if
    the settings do not say which."""
    first = config.data_parallel_start_rank
    if first is None or config.data_parallel_address is None:
        raise ConfigError(
            "headless runs engines or ranks of another host's server. For engines, give "
            "data_parallel_size, data_parallel_size_local, the number of the first one with "
            "data_parallel_start_rank, and the server's address with data_parallel_address. For "
            "ranks, give the number of hosts with nnodes and that of this one, from 1 on, with "
            "node_rank"
        )
    local = config.data_parallel_size_local
    return range(first, config.data_parallel_size if local is None else first + local)


def engine_number(config: EngineConfig) -> int:
    """Return the number of the engine that these settings are for."""
    if config.data_parallel_rank is not None:
        return config.data_parallel_rank
    return config.data_parallel_start_rank or 0


def local_engine(config: EngineConfig) -> int:
    """Return the number of the engine among those of its server, counted from 0."""
    start = config.data_parallel_start_rank
    return 0 if start is None else engine_number(config) - start


def local_engines(config: EngineConfig) -> int:
    """Return how many engines share the host."""
    if config.data_parallel_size_local is not None:
        return config.data_parallel_size_local
    return 1 if config.data_parallel_rank is not None else config.data_parallel_size


def chosen_engine(config: EngineConfig, *wishes: int | None) -> int | None:
    """Return the number of the engine that a request must go to: its first wish. None = any. Raises
    RequestError if this server does not run the engine."""
    rank = next((wish for wish in wishes if wish is not None), None)
    numbers = engine_numbers(config)
    if rank is not None and rank not in numbers:
        raise RequestError(
            f"data_parallel_rank is {rank}, but this server's engines are {numbers.start} to "
            f"{numbers.stop - 1}",
            parameter="data_parallel_rank",
        )
    return rank


def check_expert_engines(config: EngineConfig) -> None:
    """Raise ConfigError if engines cannot share out experts so."""
    if config.all2all_backend not in ALL2ALL:
        raise ConfigError(
            f"all2all_backend is {config.all2all_backend!r}, which sends tokens only to the ranks "
            "of their experts; Pegboard's ranks get all tokens, so expected "
            f"{' or '.join(ALL2ALL)}"
        )
    count = config.expert_engines
    if count == 1:
        return
    rank = config.data_parallel_rank
    start = config.data_parallel_start_rank
    is_one_of_several = start is None if rank is not None else bool(start)
    if config.data_parallel_hybrid_lb or is_one_of_several:
        raise ConfigError(
            f"enable_expert_parallel shares out the experts among {count} engines, which must "
            "belong to one server; remove enable_expert_parallel, so that each engine has all "
            "experts, or let one server balance all engines"
        )
    for name, value in ALONE.items():
        if getattr(config, name) not in (value, None):
            raise ConfigError(
                f"{name} cannot be used where {count} engines share out experts "
                "(data_parallel_size with enable_expert_parallel); remove one of them"
            )
