"""Makes a LoRA resolver of Pegboard from one in vLLM's form."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pegboard.interfaces.lora_resolver import LoRAResolverSetup
from pegboard_vllm_compat.resolver_interface import LoRAResolverRegistry
from pegboard_vllm_compat.targets import provide


class VllmResolver:
    """Implements `pegboard.interfaces.lora_resolver.LoRAResolver`. target: what registers the
    resolver `name`. base_model: the model that is served."""

    target: ClassVar[str]
    name: ClassVar[str]
    base_model: ClassVar[str] = ""
    shadow: ClassVar[bool] = False

    def __init__(self, options: None, setup: LoRAResolverSetup) -> None:
        provide(self.target, shadow=self.shadow)
        self._resolver = LoRAResolverRegistry.get_resolver(self.name)

    async def resolve(self, name: str) -> Path | None:
        """See `LoRAResolver.resolve`."""
        request = await self._resolver.resolve_lora(self.base_model, name)
        return Path(request.lora_path) if request is not None else None
