"""The engines of data parallel: which of them a server runs, and their places on its host.

Engines are numbered over all hosts. A server with internal balancing runs all of them. With hybrid
balancing it runs those of its host, and with external balancing one.
"""

from __future__ import annotations

from pegboard.config.schema import EngineConfig
from pegboard.errors import ConfigError, RequestError

ROUTER_ADVICE = (
    "start a server on each host with data_parallel_hybrid_lb, data_parallel_size_local and "
    "data_parallel_start_rank, and put a router in front of them"
)


ALL2ALL = ("allgather_reducescatter", "naive")

ALONE = {
    "pipeline_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "enable_eplb": False,
    "spec_method": None,
    "max_loras": 0,
    "enable_sleep_mode": False,
    "kv_connectors": None,
    "calculate_kv_scales": False,
}
"""Settings that engines which share out experts cannot have another value of."""


def engine_numbers(config: EngineConfig) -> range:
    """Return the numbers of the engines that this server runs. Raises ConfigError if the settings
    about data parallel do not fit together."""
    start = config.data_parallel_start_rank or 0
    local = config.data_parallel_size_local
    rank = config.data_parallel_rank
    is_hybrid = config.data_parallel_hybrid_lb or start > 0
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
    if local not in (None, config.data_parallel_size):
        raise ConfigError(
            f"data_parallel_size_local is {local} of {config.data_parallel_size} engines, but a "
            f"server starts engines only on its own host; {ROUTER_ADVICE}"
        )
    return range(config.data_parallel_size)


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
    local = config.data_parallel_size_local
    if local is None:
        local = count if config.data_parallel_rank is None else 1
    if local < count:
        raise ConfigError(
            f"enable_expert_parallel shares out the experts among {count} engines, which one "
            f"server must run, but this one runs {local}; remove enable_expert_parallel, so that "
            "each engine has all experts, or let this server run all engines"
        )
    for name, value in ALONE.items():
        if getattr(config, name) not in (value, None):
            raise ConfigError(
                f"{name} cannot be used where {count} engines share out experts "
                "(data_parallel_size with enable_expert_parallel); remove one of them"
            )
