"""The worker half: copies blocks in the step, and exchanges them in threads."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from pegboard import env
from pegboard.data.batch import TransferReport
from pegboard.errors import ConfigError
from pegboard.interfaces.attention import KVGroup, KVView
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard.log import get_logger
from pegboard_kv import plan as transfer_plan
from pegboard_kv.loads import Loads
from pegboard_kv.peers.book import AddressBook
from pegboard_kv.peers.connections import Address, Peers
from pegboard_kv.peers.options import PeerOptions
from pegboard_kv.peers.plan import Plan, decode
from pegboard_kv.peers.server import BlockServer
from pegboard_kv.peers.store import HostStore, Name
from pegboard_kv.peers.transport import Transport
from pegboard_kv.peers.wire import Engine, PeerError
from pegboard_kv.plan import Place, TransferPlan
from pegboard_kv.rows import BlockRows

log = get_logger(__name__)

NUM_THREADS = 8
"""Transfers at once. They wait for the network and for other engines most of the time."""
DOWN_S = 5.0
"""After an error, an engine is left alone for this time."""
AT_ONCE = 64
"""Blocks that are asked for or sent together."""


def check_key(options: PeerOptions) -> None:
    """Raise ConfigError if other hosts can reach this engine, and it has no key."""
    local = AddressBook(["127.0.0.0/8", "::1", "localhost"])
    if env.cluster_key() is None and not local.has(options.host):
        raise ConfigError(
            f"this engine serves KV blocks on {options.host}, which other hosts can reach; set "
            f"{env.CLUSTER_KEY} to the same random text for all engines"
        )


class PeerWorker:
    """A saved block is copied to host memory within the step, from where a thread serves it. A load
    fetches blocks in another thread, or waits until they are sent; its blocks belong to no step
    until it is reported. transport: how blocks are sent; it ends with the worker half."""

    def __init__(self, options: PeerOptions, setup: KVConnectorSetup, transport: Transport) -> None:
        check_key(options)
        self._options = options
        self._setup = setup
        plan = setup.plan
        self._engine = Engine(
            plan.identity,
            setup.rank,
            plan.facts,
            env.cluster_key(),
            transport=transport.name,
            endpoint=transport.endpoint,
        )
        self._transport = transport
        self.store = HostStore(options.num_bytes, transport.memory)
        self._peers = Peers(self._engine, transport, options.timeout_s)
        self._server: BlockServer | None = None
        self._threads = ThreadPoolExecutor(NUM_THREADS, "kv-transfer")
        self._loads = Loads(self._threads)
        self._down: dict[Address, float] = {}
        self._plan = TransferPlan()
        self._sources: Mapping[str, Address | None] = {}

    def register(self, views: Mapping[int, KVView], groups: Sequence[KVGroup]) -> None:
        self._rows = [BlockRows(views, group.layers) for group in groups]
        if self._server is not None:
            self.store.clear()
            return
        options = self._options
        self._server = BlockServer(
            (options.host, options.port + self._setup.number),
            self._engine,
            self._transport,
            self.store,
            AddressBook(options.peers),
            [rows.num_bytes for rows in self._rows],
            takes=options.role != "kv_producer",
        )

    # --- saves ------------------------------------------------------------------------------------

    def save(self, plan: bytes) -> None:
        step_plan = decode(plan) if plan else Plan(b"")
        self._plan = transfer_plan.decode(step_plan.transfers)
        self._sources = step_plan.sources
        for group, block_rows in enumerate(self._rows):
            places = {
                place.block_hash: place
                for place in self._plan.saves
                if place.group == group and (group, place.block_hash) not in self.store
            }
            if not block_rows.num_bytes:
                continue  # the same rank of the other engine has no layers of the group either
            rows = block_rows.read([place.block_id for place in places.values()]) if places else ()
            for block_hash, row in zip(places, rows, strict=True):
                self.store.save((group, block_hash), memoryview(row.numpy()))
        for address in step_plan.strangers:
            self._threads.submit(self._ask, self._ranked((address[0], address[1])))
        targets: dict[tuple[Address, int], list[Name]] = {}
        for group, block_hash, address in step_plan.targets:
            targets.setdefault((tuple(address), group), []).append((group, block_hash))  # type: ignore[arg-type]
        for (address, _), names in targets.items():
            blocks = [(name, self.store.wait_for(name, 0.0)) for name in names]
            present = [(name, content) for name, content in blocks if content is not None]
            self._threads.submit(self._send, self._ranked(address), present)

    def _ask(self, address: Address) -> None:
        """Ask an engine what it is, and log why its blocks have other names."""
        try:
            self._peers.get(address, 0, [], [])
        except (OSError, PeerError) as error:
            self._failed(address, "cannot be fetched from", error)
            return
        log.warning(
            "the blocks of a prompt have other names at %s:%d, so it is computed here: both "
            "engines need the same weights, also after updates, and both requests the same "
            "prompt, adapter and cache_salt",
            *address,
        )

    def _ranked(self, address: Address) -> Address:
        """Return the address of the other engine's rank that has this rank's part."""
        host, port = address
        return host, port + self._setup.rank

    def _send(self, address: Address, blocks: Sequence[tuple[Name, memoryview]]) -> None:
        for start in range(0, len(blocks), AT_ONCE):
            if self._is_down(address):
                return
            try:
                self._peers.put(address, blocks[start : start + AT_ONCE])
            except (OSError, PeerError) as error:
                self._failed(address, "cannot be sent to", error)

    def _is_down(self, address: Address) -> bool:
        return time.monotonic() < self._down.get(address, 0.0)

    def _failed(self, address: Address, what: str, error: Exception) -> None:
        self._down[address] = time.monotonic() + DOWN_S
        # the text alone: the error itself has the buffers, and a log may keep it
        log.warning("KV blocks %s %s:%d: %s", what, *address, str(error))

    # --- loads ------------------------------------------------------------------------------------

    def begin(self, plan: bytes) -> None:
        for key, places in self._plan.loads.items():
            source = self._sources.get(key)
            address = None if source is None else self._ranked((source[0], source[1]))
            self._loads.begin(key, self._load, places, address)

    def _load(self, places: Sequence[Place], address: Address | None) -> int | None:
        """Copy blocks of a request to the KV memory. Return the first token that is missing, or
        None."""
        until = time.monotonic() + self._options.timeout_s
        missing: list[int] = []
        for group, block_rows in enumerate(self._rows):
            wanted = [place for place in places if place.group == group and block_rows.num_bytes]
            for start in range(0, len(wanted), AT_ONCE):
                part = wanted[start : start + AT_ONCE]
                present = self._load_part(part, block_rows, address, until)
                missing += [
                    place.first_token
                    for place, is_there in zip(part, present, strict=True)
                    if not is_there
                ]
        return min(missing, default=None)

    def _load_part(
        self, part: Sequence[Place], block_rows: BlockRows, address: Address | None, until: float
    ) -> list[bool]:
        """Copy blocks of one KV group to the KV memory. Return for each whether it came."""
        size = block_rows.num_bytes
        memory = self.store.room(len(part) * size)
        if memory is None:
            log.warning(
                "KV blocks are computed, because all memory for them is in use; raise "
                "the option size_gb"
            )
            return [False] * len(part)
        buffers = [memory[i * size : (i + 1) * size] for i in range(len(part))]
        present = self._fill(part, buffers, address, until)
        rows = torch.frombuffer(memory, dtype=torch.uint8).view(len(part), size)
        if all(present):
            block_rows.write([place.block_id for place in part], rows)
        elif any(present):
            ids = [p.block_id for p, is_there in zip(part, present, strict=True) if is_there]
            block_rows.write(ids, rows[torch.tensor(present)])
        return present

    def _fill(
        self,
        places: Sequence[Place],
        buffers: Sequence[memoryview],
        address: Address | None,
        until: float,
    ) -> list[bool]:
        """Fill the buffers with blocks: those that are here, then those of another engine. Return
        for each whether it came."""
        present = []
        for place, buffer in zip(places, buffers, strict=True):
            wait_until = until if address is None else 0.0
            content = self.store.wait_for((place.group, place.block_hash), wait_until)
            present.append(content is not None and len(content) == len(buffer))
            if present[-1]:
                buffer[:] = content  # type: ignore[assignment]
            elif address is None:
                until = 0.0
        rest = [i for i, is_there in enumerate(present) if not is_there]
        if address is None or not rest or self._is_down(address):
            return present
        try:
            answers = self._peers.get(
                address,
                places[0].group,
                [places[i].block_hash for i in rest],
                [buffers[i] for i in rest],
            )
        except (OSError, PeerError) as error:
            self._failed(address, "cannot be fetched from", error)
            return present
        for i, is_there in zip(rest, answers, strict=True):
            present[i] = is_there
        return present

    def end(self) -> TransferReport:
        return self._loads.report(self._plan)

    def close(self) -> None:
        """End all transfers and connections."""
        self.store.close()
        self._peers.close()
        self._transport.close()
        if self._server is not None:
            self._server.close()
        self._threads.shutdown(cancel_futures=True)
