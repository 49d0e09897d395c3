"""Kind `lora_resolver` (provisional): finds the LoRA adapter that a request names as its `model`.
Resolvers form an ordered chain (the setting `lora_resolvers`), and the first hit wins. Runs in
A."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pegboard.interfaces.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAResolverSpec(Spec):
    """Entry-point name: what `lora_resolvers` calls it. Resolvers declare only what every spec
    declares."""


@dataclass(frozen=True, slots=True)
class LoRAResolverSetup:
    """fetch: (reference, revision, file name patterns) → the directory with these files, which the
    installed model sources download if needed. It blocks, so call it in a thread. Raises
    ModelError. It fetches whatever it is asked for, so a resolver must check first that the
    operator allows it."""

    fetch: Callable[[str, str | None, tuple[str, ...]], Path]


class LoRAResolver(Protocol):
    async def resolve(self, name: str) -> Path | None:
        """Return the directory on local disk that holds the adapter, or None if this resolver does
        not know the name.

        name: what a client sent as its model. The caller has checked that it has up to 200 letters,
        digits and "_-.+=@:", with single slashes between its parts, and that no part begins with a
        dot. It still comes from a client, so return only what the operator has made available.
        Raises ModelError if there is such an adapter, but it cannot be had.

        The caller runs one call per name at a time, remembers names that no resolver knows for a
        short time, limits how long a request waits, and checks which base model the adapter was
        made for. All calls are made on the server's event loop, so what blocks belongs in a thread.
        """
