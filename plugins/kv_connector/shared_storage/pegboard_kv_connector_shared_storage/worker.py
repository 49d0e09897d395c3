"""The worker half: copies blocks in the step, and reads and writes their files in threads."""

from __future__ import annotations

import threading
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
from pegboard_kv_connector_shared_storage.block_file import BlockHeader
from pegboard_kv_connector_shared_storage.folder import BlockFolder
from pegboard_kv_connector_shared_storage.options import SharedStorageOptions

log = get_logger(__name__)

NUM_READERS = 4
"""Threads that read files. More than the processors are useful where the file system is slow."""
MAX_WAITING_BYTES = 1 << 29
"""Copies of blocks that wait to be written. When there are more, blocks are not saved: the engine
must not wait for the disk."""
HASH_BYTES = 32


class SharedStorageWorker:
    """A save is a copy to host memory within the step, and a write in one thread. A load reads,
    checks and copies in another thread; the blocks belong to no step until it is reported."""

    def __init__(self, options: SharedStorageOptions, setup: KVConnectorSetup) -> None:
        self._setup = setup
        self._folder = BlockFolder.open(options, setup)
        self._readers = ThreadPoolExecutor(NUM_READERS, "kv-read")
        self._writer = ThreadPoolExecutor(1, "kv-write")
        self._lock = threading.Lock()
        self._waiting: set[tuple[int, bytes]] = set()
        self._waiting_bytes = 0
        self._loads = Loads(self._readers)
        self._plan = TransferPlan()
        self._has_warned = False

    def register(self, views: Mapping[int, KVView], groups: Sequence[KVGroup]) -> None:
        identity = self._setup.plan.identity
        rank = self._setup.rank
        self._rows = [BlockRows(views, group.layers) for group in groups]
        self._headers = [
            BlockHeader(identity, rank, i, rows.parts, HASH_BYTES)
            for i, rows in enumerate(self._rows)
        ]

    # --- saves ------------------------------------------------------------------------------------

    def save(self, plan: bytes) -> None:
        self._plan = decode(plan)
        for group, block_rows in enumerate(self._rows):
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
                header = self._headers[place.group].encode(place.block_hash, content)
                self._folder.write(place.group, place.block_hash, [header, content])
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
        """Copy blocks from files to the KV memory. Return the first token that is missing, or None.
        The files after it are read too, so that all damaged ones are deleted and written again."""
        first_bad: int | None = None
        for group, block_rows in enumerate(self._rows):
            wanted = [place for place in places if place.group == group]
            rows = torch.empty(len(wanted), block_rows.num_bytes, dtype=torch.uint8)
            for place, row in zip(wanted, rows, strict=True):
                if not self._read(place, memoryview(row.numpy())):
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

    def _read(self, place: Place, content: memoryview) -> bool:
        """Read a block's file into `content`. Return False if the file is not that block, and
        delete it."""
        expected = self._headers[place.group]
        header = bytearray(expected.num_bytes)
        try:
            self._folder.read(place.group, place.block_hash, [header, content])
            if header != expected.encode(place.block_hash, content):
                raise ValueError("its header or its checksum is not the expected one")
        except FileNotFoundError:
            return False  # another process has deleted it
        except (OSError, ValueError) as error:
            path = self._folder.path(place.group, place.block_hash)
            log.warning(
                "the stored KV block %s is refused: %s; its tokens are computed", path, error
            )
            self._folder.remove(place.group, place.block_hash)
            return False
        return True

    def end(self) -> TransferReport:
        return self._loads.report(self._plan)

    def close(self) -> None:
        """Write what waits to be written. Loads that have not begun are dropped."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()
