"""What the engines of several ranks must not have if each rank has one. They get the same requests
in the same order, and must make the same decisions without asking each other."""

from pegboard.config.schema import EngineConfig
from pegboard.errors import ConfigError

SPEEDS_DIFFER = "it takes a time that differs between ranks, whose engines would decide differently"

TIMED = ("target_itl_ms", "max_loras", "kv_connectors")


def check_agreement(executor: str, config: EngineConfig, in_program: bool) -> None:
    """Raise ConfigError for settings whose effect depends on time, and unless the program itself
    gives the engine its requests."""
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
