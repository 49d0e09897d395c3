"""The worker half of connectors that keep blocks in a store outside of the engine."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from pegboard.data.batch import TransferReport
from pegboard.interfaces.attention import KVGroup, KVView
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard.log import get_logger
from pegboard_kv.loads import Loads
from pegboard_kv.plan import Place, TransferPlan, decode
from pegboard_kv.rows import BlockRows

log = get_logger(__name__)

NUM_READERS = 4
"""Threads that read from the store. More than the processors are useful where it is slow."""
MAX_WAITING_BYTES = 1 << 29
"""Copies of blocks that wait to be written. When there are more, blocks are not saved: the engine
must not wait for the store."""


class StoreWorker(ABC):
    """A save is a copy to host memory within the step, and a write in one thread. A load reads,
    checks and copies in another thread; the blocks belong to no step until it is reported."""

    def __init__(self, setup: KVConnectorSetup) -> None:
        self.setup = setup
        self._readers = ThreadPoolExecutor(NUM_READERS, "kv-read")
        self._writer = ThreadPoolExecutor(1, "kv-write")
        self._lock = threading.Lock()
        self._waiting: set[tuple[int, bytes]] = set()
        self._waiting_bytes = 0
        self._loads = Loads(self._readers)
        self._plan = TransferPlan()
        self._has_warned = False

    @abstractmethod
    def write(self, place: Place, content: memoryview) -> None:
        """Write a block to the store. Raises OSError."""

    @abstractmethod
    def read(self, place: Place, content: memoryview) -> bool:
        """Fill `content` with a block of the store. Return False if the store does not have it, or
        has something else under its name, which is then deleted. Any thread may call it."""

    def register(self, views: Mapping[int, KVView], groups: Sequence[KVGroup]) -> None:
        self.rows = [BlockRows(views, group.layers) for group in groups]

    # --- saves ------------------------------------------------------------------------------------

    def save(self, plan: bytes) -> None:
        self._plan = decode(plan)
        for group, block_rows in enumerate(self.rows):
            places = [
                place
                for place in self._plan.saves
                if place.group == group and self._claim(place, block_rows.num_bytes)
            ]
            if places:
                rows = block_rows.read([place.block_id for place in places])
                self._writer.submit(self._write, places, rows)

    def _claim(self, place: Place, num_bytes: int) -> bool:
        """Return whether the block is to be written: it does not wait for that already, and there
        is room for its copy."""
        name = (place.group, place.block_hash)
        with self._lock:
            if name in self._waiting or self._waiting_bytes + num_bytes > MAX_WAITING_BYTES:
                return False
            self._waiting.add(name)
            self._waiting_bytes += num_bytes
        return True

    def _write(self, places: Sequence[Place], rows: Tensor) -> None:
        for place, row in zip(places, rows, strict=True):
            content = memoryview(row.numpy())
            try:
                self.write(place, content)
            except OSError as error:
                self._warn_once("a KV block cannot be saved: %s", error)
            finally:
                with self._lock:
                    self._waiting.discard((place.group, place.block_hash))
                    self._waiting_bytes -= len(content)

    def _warn_once(self, message: str, error: OSError) -> None:
        (log.debug if self._has_warned else log.warning)(message, error)
        self._has_warned = True

    # --- loads ------------------------------------------------------------------------------------

    def begin(self, plan: bytes) -> None:
        for key, places in self._plan.loads.items():
            self._loads.begin(key, self._load, places)

    def _load(self, places: Sequence[Place]) -> int | None:
        """Copy blocks from the store to the KV memory. Return the first token that is missing, or
        None. The blocks after it are read too, so that all damaged ones are deleted and written
        again."""
        first_bad: int | None = None
        for group, block_rows in enumerate(self.rows):
            wanted = [place for place in places if place.group == group]
            rows = torch.empty(len(wanted), block_rows.num_bytes, dtype=torch.uint8)
            for place, row in zip(wanted, rows, strict=True):
                if not self.read(place, memoryview(row.numpy())):
                    first_bad = (
                        place.first_token
                        if first_bad is None
                        else min(first_bad, place.first_token)
                    )
            good = [
                place.block_id
                for place in wanted
                if first_bad is None or place.first_token < first_bad
            ]
            if good:
                block_rows.write(good, rows[: len(good)])
        return first_bad

    def end(self) -> TransferReport:
        return self._loads.report(self._plan)

    def close(self) -> None:
        """Write what waits to be written. Loads that have not begun are dropped."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()
