"""A stand-in for the parts of LMCache 0.5 that the connector uses. Remote stores are in this
process, by their address. It refuses what the real one refuses (`test_lmcache.py` asks both)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

REMOTES: dict[str, dict[str, bytes]] = {}
"""Address → the blocks there, by their keys."""


class MemoryFormat(Enum):
    KV_2LTD = 1


class EventManager: ...


@dataclass
class LMCacheMetadata:
    model_name: str
    world_size: int
    local_world_size: int
    worker_id: int
    local_worker_id: int
    kv_dtype: torch.dtype
    kv_shape: tuple[int, ...]


@dataclass
class LMCacheEngineConfig:
    remote_url: str
    remote_serde: str
    local_cpu: bool
    max_local_cpu_size: float

    @classmethod
    def from_defaults(cls, **settings: Any) -> LMCacheEngineConfig:
        """Names that are none are ignored."""
        return cls(**{name: settings[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class CacheEngineKey:
    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: int
    dtype: torch.dtype

    def to_string(self) -> str:
        return f"{self.model_name}@{self.world_size}@{self.worker_id}@{self.chunk_hash:x}@uint8"


class MemoryObj:
    """Memory of the pool. It goes back when nobody refers to it."""

    def __init__(self, shape: torch.Size, give_back: Callable[[int], None]) -> None:
        self.tensor = torch.zeros(shape, dtype=torch.uint8)
        self._give_back = give_back
        self._count = 1

    def ref_count_up(self) -> None:
        self._count += 1

    def ref_count_down(self) -> None:
        assert self._count > 0, "more references were given back than there were"
        self._count -= 1
        if not self._count:
            self._give_back(self.tensor.numel())


class LocalCPUBackend:
    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        return False


class RemoteBackend:
    """connection: the store; None if there is none at the address."""

    def __init__(self, url: str) -> None:
        self.connection = REMOTES.setdefault(url, {}) if url.startswith("fs://") else None
        self.put_tasks: set[CacheEngineKey] = set()

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        return key in self.put_tasks


class StorageManager:
    """Writes to the remote store in a thread, as the real one does."""

    delay_s = 0.002

    def __init__(
        self, config: LMCacheEngineConfig, metadata: LMCacheMetadata, events: EventManager
    ) -> None:
        self.remote = RemoteBackend(config.remote_url)
        self.storage_backends: dict[str, Any] = {
            "LocalCPUBackend": LocalCPUBackend(),
            "RemoteBackend": self.remote,
        }
        self._free = int(config.max_local_cpu_size * 2**30)
        self._memory: OrderedDict[CacheEngineKey, MemoryObj] = OrderedDict()
        self._lock = threading.RLock()
        self._is_closed = False

    def _give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._free += num_bytes

    def allocate(
        self, shape: torch.Size, dtype: torch.dtype, layout: MemoryFormat, busy_loop: bool = True
    ) -> MemoryObj | None:
        assert len(shape) == 4 and dtype == torch.uint8 and isinstance(layout, MemoryFormat)
        with self._lock:
            while self._memory and self._free < shape.numel():
                self._memory.popitem(last=False)[1].ref_count_down()
            if self._free < shape.numel():
                return None
            self._free -= shape.numel()
            return MemoryObj(shape, self._give_back)

    def batched_put(self, keys: Sequence[CacheEngineKey], held: Sequence[MemoryObj]) -> None:
        for key, each in zip(keys, held, strict=True):
            with self._lock:
                if key in self._memory:
                    each.ref_count_down()
                else:
                    self._memory[key] = each
                self.remote.put_tasks.add(key)
            content = each.tensor.numpy().tobytes()
            threading.Timer(self.delay_s, self._write, (key, content)).start()

    def _write(self, key: CacheEngineKey, content: bytes) -> None:
        if self.remote.connection is not None and not self._is_closed:
            self.remote.connection[key.to_string()] = content
        self.remote.put_tasks.discard(key)

    def contains(self, key: CacheEngineKey, search_range: Sequence[str]) -> str | None:
        assert search_range == ["RemoteBackend"]
        return "RemoteBackend" if key.to_string() in (self.remote.connection or {}) else None

    def get(self, key: CacheEngineKey) -> MemoryObj | None:
        with self._lock:
            if (held := self._memory.get(key)) is not None:
                held.ref_count_up()
                return held
        content = (self.remote.connection or {}).get(key.to_string())
        if content is None:
            return None
        held = self.allocate(torch.Size([1, 1, len(content), 1]), torch.uint8, MemoryFormat.KV_2LTD)
        if held is not None:
            held.tensor.view(-1).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        return held

    def remove(self, key: CacheEngineKey) -> int:
        with self._lock:
            if (held := self._memory.pop(key, None)) is not None:
                held.ref_count_down()
        (self.remote.connection or {}).pop(key.to_string(), None)
        return 1

    def close(self) -> None:
        assert not self._is_closed
        self._is_closed = True


def stored(url: str) -> Iterator[tuple[str, bytes]]:
    yield from sorted(REMOTES.get(url, {}).items())
