"""The LoRA resolver `hub`: the name of an adapter is "org/name", or "org/name/folder" for one in a
folder of the repository.

Only repositories that the operator allows are fetched, at the revision that the operator chose. The
installed model source downloads them, with its token and its cache.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pegboard.interfaces.lora_resolver import LoRAResolverSetup
from pegboard_lora_resolver_hub.options import REPOSITORY, HubOptions

FILES = ("adapter_config.json", "adapter_model.safetensors")


class HubResolver:
    """Downloads in threads of its own, at most four adapters at a time."""

    def __init__(self, options: HubOptions, setup: LoRAResolverSetup) -> None:
        matches = [REPOSITORY.fullmatch(repository) for repository in options.repositories]
        self._revisions = {match["name"]: match["revision"] for match in matches if match}
        self._fetch = setup.fetch
        self._threads = ThreadPoolExecutor(4, "lora-resolver")

    async def resolve(self, name: str) -> Path | None:
        organization, _, rest = name.partition("/")
        repository, _, folder = rest.partition("/")
        allowed = f"{organization}/{repository}"
        if allowed not in self._revisions:
            return None
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._download, allowed, folder
        )

    def _download(self, repository: str, folder: str) -> Path | None:
        prefix = f"{folder}/" if folder else ""
        reference = f"hub:{repository}:{prefix}{FILES[1]}"
        root = self._fetch(
            reference, self._revisions[repository], tuple(prefix + name for name in FILES)
        )
        return root / folder
