"""The LoRA resolver `filesystem`: the name of an adapter is the path of its folder below one
folder.

Nothing outside that folder is ever returned, whatever the name says and wherever symbolic links
lead.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.lora_resolver import LoRAResolverSetup
from pegboard_lora_resolver_filesystem.options import FilesystemOptions

FILES = ("adapter_config.json", "adapter_model.safetensors", "*.gguf")
"""Patterns of the files that make a folder an adapter. It needs one of them."""


class FilesystemResolver:
    """Looks for a folder of the adapter's name. A network file system can be slow, so it looks in
    threads of its own."""

    def __init__(self, options: FilesystemOptions, setup: LoRAResolverSetup) -> None:
        self._root = options.directory.expanduser()
        if not self._root.is_dir():
            raise ConfigError(
                f"lora_resolver.filesystem.directory: {self._root} is not a folder; make it or "
                "name another"
            )
        self._threads = ThreadPoolExecutor(4, "lora-resolver")

    async def resolve(self, name: str) -> Path | None:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._find, name)

    def _find(self, name: str) -> Path | None:
        try:
            root = self._root.resolve()
            folder = (root / name).resolve()
            if not folder.is_relative_to(root) or folder == root or not folder.is_dir():
                return None
            files = [path for pattern in FILES for path in folder.glob(pattern)]
            if not all(path.is_file() and path.resolve().is_relative_to(root) for path in files):
                return None
        except (OSError, ValueError, RuntimeError) as error:
            # a name that no file can have, a loop of links, no permission
            if isinstance(error, PermissionError):
                raise ModelError(f"adapter {name!r} cannot be read: {error.strerror}") from error
            return None
        return folder if files else None
