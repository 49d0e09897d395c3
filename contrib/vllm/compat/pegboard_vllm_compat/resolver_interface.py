"""The class from which vLLM's LoRA resolvers derive, and the registry where general plugins put
them (`vllm.lora.resolver`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set
from typing import Any


class LoRAResolver(ABC):
    """Finds adapters by name."""

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
        """Return the LoRARequest of an adapter, or None."""


class Registry:
    """Resolvers by name."""

    def __init__(self) -> None:
        self.resolvers: dict[str, LoRAResolver] = {}

    def get_supported_resolvers(self) -> Set[str]:
        """Return the names of all resolvers."""
        return self.resolvers.keys()

    def register_resolver(self, resolver_name: str, resolver: LoRAResolver) -> None:
        """Register a resolver, in place of an earlier one of this name."""
        self.resolvers[resolver_name] = resolver

    def get_resolver(self, resolver_name: str) -> LoRAResolver:
        """Return the resolver of a name. Raises KeyError."""
        return self.resolvers[resolver_name]


LoRAResolverRegistry = Registry()
"""The resolvers of this process."""
