"""Blocks in LMCache: its storage manager, which has memory of its own and the remote store behind
it. The library is imported when a store is opened."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from pegboard.errors import ConfigError
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard.log import get_logger
from pegboard_kv_connector_lmcache.options import LMCacheOptions

log = get_logger(__name__)

CRC_BYTES = 8
"""Before the content: its CRC-32, little-endian."""
MEMORY = "LocalCPUBackend"
"""LMCache's name for its own memory."""
CLOSE_S = 10.0
"""How long `close` waits for blocks that LMCache has not written yet."""
FINDER_GIB = 0.01
"""Memory of a store that only finds blocks. LMCache opens none without."""


@dataclass(frozen=True)
class _Library:
    """What is used of LMCache, by its names there."""

    LMCacheEngineConfig: Any
    LMCacheMetadata: Any
    EventManager: Any
    StorageManager: Any
    MemoryFormat: Any
    CacheEngineKey: Any


class LMCacheStore:
    """The blocks of one engine and rank. gib: size of the memory in front. Any thread may call the
    methods. Raises ConfigError if the library or the remote store cannot be used."""

    def __init__(self, options: LMCacheOptions, setup: KVConnectorSetup, gib: float) -> None:
        self._library = library = _library()
        self._identity = (setup.plan.identity or "none")[:32]
        self._rank = setup.rank
        settings = {
            "remote_serde": "naive",
            **options.settings,
            "remote_url": options.remote_url,
            "local_cpu": True,
            "max_local_cpu_size": gib,
        }
        metadata = library.LMCacheMetadata(
            model_name=self._identity,
            world_size=1,
            local_world_size=1,
            worker_id=setup.rank,
            local_worker_id=0,
            kv_dtype=torch.uint8,
            kv_shape=(1, 1, 256, 1, 1),
        )
        try:
            config = library.LMCacheEngineConfig.from_defaults(**settings)
            unknown = [name for name in settings if not hasattr(config, name)]
            if unknown:
                raise ValueError(f"LMCache has no setting {', '.join(unknown)}")
            self._manager = _in_daemon(
                lambda: library.StorageManager(config, metadata, library.EventManager())
            )
        except Exception as error:  # the library's errors have no common class
            raise ConfigError(
                f"LMCache cannot be started: {type(error).__name__}: {error}; check remote_url, "
                "max_local_cpu_size and settings"
            ) from error
        self._writing: set[Any] = set()
        backends = self._manager.storage_backends
        self._stores = [name for name in backends if name != MEMORY]
        if not self._stores or any(
            getattr(backends[name], "connection", self) is None for name in self._stores
        ):
            self.close()
            raise ConfigError(
                f"LMCache cannot use remote_url={_without_password(options.remote_url)!r}; its log "
                "says why. It must "
                "name a store that LMCache knows and that answers"
            )

    def _key(self, group: int, block_hash: bytes) -> Any:
        number = int.from_bytes(block_hash, "big")
        name = f"{self._identity}-{group}"
        return self._library.CacheEngineKey(name, 1, self._rank, number, torch.uint8)

    def has(self, group: int, block_hash: bytes) -> bool:
        """Return whether the remote store has something under the block's name."""
        return self._manager.contains(self._key(group, block_hash), self._stores) is not None

    def read(self, group: int, block_hash: bytes, content: memoryview) -> bool:
        """Fill `content` with the block. Return False if it is not there, or if something else is,
        which is then removed."""
        key = self._key(group, block_hash)
        held = self._manager.get(key)
        if held is None:
            return False
        try:
            stored = memoryview(held.tensor.flatten().numpy())
            if len(stored) == CRC_BYTES + len(content):
                content[:] = stored[CRC_BYTES:]
                if int.from_bytes(stored[:CRC_BYTES], "little") == zlib.crc32(content):
                    return True
        finally:
            held.ref_count_down()
        log.warning("LMCache has something else under the name of a KV block; it is computed")
        self._manager.remove(key)
        return False

    def write(self, group: int, block_hash: bytes, content: memoryview) -> None:
        """Hand the block to LMCache, which writes it later. Raises OSError if its memory is
        full."""
        shape = torch.Size([1, 1, CRC_BYTES + len(content), 1])
        layout = self._library.MemoryFormat.KV_2LTD
        held = self._manager.allocate(shape, torch.uint8, layout, busy_loop=False)
        if held is None:
            raise OSError("the memory of LMCache is full (max_local_cpu_size)")
        stored = memoryview(held.tensor.flatten().numpy())
        stored[:CRC_BYTES] = zlib.crc32(content).to_bytes(CRC_BYTES, "little")
        stored[CRC_BYTES:] = content
        key = self._key(group, block_hash)
        self._manager.batched_put([key], [held])
        self._writing = {each for each in self._writing if self._is_written_later(each)} | {key}

    def _is_written_later(self, key: Any) -> bool:
        backends = self._manager.storage_backends
        return any(backends[name].exists_in_put_tasks(key) for name in self._stores)

    def close(self) -> None:
        """Wait for what is written, and release what LMCache holds."""
        until = time.monotonic() + CLOSE_S
        while any(map(self._is_written_later, self._writing)) and time.monotonic() < until:
            time.sleep(0.005)
        self._manager.close()


def _without_password(url: str) -> str:
    scheme, separator, place = url.partition("://")
    return f"{scheme}{separator}{place.rpartition('@')[2]}"


def _in_daemon(build: Callable[[], Any]) -> Any:
    """Return what `build` returns. The threads that it starts do not keep the process alive, as
    those of LMCache otherwise do."""
    results: list[Any] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(build())
        except Exception as error:  # noqa: BLE001  raised below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="lmcache-start")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _library() -> Any:
    try:
        return _Library(
            import_module("lmcache.v1.config").LMCacheEngineConfig,
            import_module("lmcache.v1.metadata").LMCacheMetadata,
            import_module("lmcache.v1.event_manager").EventManager,
            import_module("lmcache.v1.storage_backend.storage_manager").StorageManager,
            import_module("lmcache.v1.memory_management").MemoryFormat,
            import_module("lmcache.utils").CacheEngineKey,
        )
    except ImportError as error:
        raise ConfigError(
            f"the KV connector lmcache needs the library lmcache: pip install lmcache ({error})"
        ) from error
