"""vLLM's nested configurations. Pegboard takes them as mappings, so each is a dict whose keys are
also attributes."""

from __future__ import annotations

from typing import Any


class Config(dict[str, Any]):
    """A mapping with the fields that were given."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(fields)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} was made without {name}") from None


class AttentionConfig(Config):
    """`attention_config`."""


class CompilationConfig(Config):
    """`compilation_config`."""


class KVEventsConfig(Config):
    """`kv_events_config`."""


class KVTransferConfig(Config):
    """`kv_transfer_config`."""


class PoolerConfig(Config):
    """`pooler_config`."""


class SpeculativeConfig(Config):
    """`speculative_config`."""


class StructuredOutputsConfig(Config):
    """`structured_outputs_config`."""


class VllmConfig(Config):
    """The type of the first argument of logits processors, for annotations."""
