"""A stand-in for `mooncake.engine` of Mooncake 0.3 with the protocol tcp. Its engines are in this
process and copy memory. It refuses what the real one refuses (`test_mooncake.py` asks both)."""

from __future__ import annotations

import ctypes
import itertools
import weakref

ENGINES: weakref.WeakValueDictionary[str, TransferEngine] = weakref.WeakValueDictionary()
"""By address."""
_ports = itertools.count(15000)


class TransferEngine:
    def __init__(self) -> None:
        self._regions: dict[int, int] = {}

    def initialize(self, host: str, metadata: str, protocol: str, device_name: str) -> int:
        """Like the real one, it takes any host, and any protocol."""
        assert metadata == "P2PHANDSHAKE"
        self._port = next(_ports)
        ENGINES[f"{host}:{self._port}"] = self
        return 0

    def get_rpc_port(self) -> int:
        return self._port

    def register_memory(self, address: int, size: int) -> int:
        if any(
            address < start + length and start < address + size
            for start, length in self._regions.items()
        ):
            return -7
        self._regions[address] = size
        return 0

    def unregister_memory(self, address: int) -> int:
        return -3 if self._regions.pop(address, None) is None else 0

    def has(self, address: int, size: int) -> bool:
        return any(
            start <= address and address + size <= start + length
            for start, length in self._regions.items()
        )

    def batch_transfer_sync_read(
        self, target: str, buffers: list[int], addresses: list[int], lengths: list[int]
    ) -> int:
        """Like the real one, it takes buffers that are not registered."""
        if not len(buffers) == len(addresses) == len(lengths):
            return -1
        engine = ENGINES.get(target)
        parts = list(zip(buffers, addresses, lengths, strict=True))
        if engine is None or not all(engine.has(address, size) for _, address, size in parts):
            return -1
        for buffer, address, size in parts:
            ctypes.memmove(buffer, address, size)
        return 0
