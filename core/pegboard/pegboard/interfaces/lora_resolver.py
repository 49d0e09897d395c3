"""Kind `lora_resolver` (provisional): finds an adapter by name. Resolvers form an ordered chain, and the first hit wins. Runs in
A."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    from pegboard.data.request import AdapterRef


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAResolverSpec(Spec):
    """Resolvers declare only what every spec declares."""


class LoRAResolver(Protocol):
    async def resolve(self, name: str) -> "AdapterRef | None":
        """Return a local directory with the adapter, or None if this resolver does not know it. Core sets a time limit, and runs
        only one call per adapter at a time."""
