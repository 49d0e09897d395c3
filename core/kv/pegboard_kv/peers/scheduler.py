"""The scheduler half: reads in a request where its blocks are, or are sent to. It imports no
torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.data.batch import Batch
from pegboard.interfaces.kv_connector import BlockView, KVConnectorSetup
from pegboard.interfaces.scheduling_policy import RequestView
from pegboard.log import get_logger
from pegboard_kv.peers.book import AddressBook
from pegboard_kv.peers.connections import Address
from pegboard_kv.peers.options import PeerOptions
from pegboard_kv.peers.plan import Plan, encode
from pegboard_kv.plan import Place
from pegboard_kv.scheduler import StoreScheduler

log = get_logger(__name__)

MAX_STRANGERS = 100
"""Engines that are asked why their blocks have other names. Clients name them."""


class _Anything:
    """The `BlockStore` of blocks that are elsewhere. Which the worker halves have, only they
    know."""

    def find(self, group: int, block_hash: bytes) -> int | None:
        return None

    def use(self, group: int, block_hash: bytes) -> int:
        return 0

    def reserve(self, group: int, block_hash: bytes) -> int | None:
        return 0

    def sent(self) -> None:
        """Nothing is kept for a plan."""


class PeerScheduler(StoreScheduler):
    """A request with do_remote_decode saves its blocks, and with remote_host also sends them there.
    One with do_remote_prefill loads remote_num_tokens tokens from remote_host, or waits for them if
    it names no host."""

    def __init__(self, options: PeerOptions, setup: KVConnectorSetup) -> None:
        super().__init__(setup, _Anything(), load="between_steps", role=options.role)
        self._book = AddressBook(options.peers)
        self._address = (options.host, options.port + setup.number)
        self._sources: dict[str, Address | None] = {}
        self._targets: list[tuple[int, bytes, Address]] = []
        self._is_warned = False
        self._strangers: dict[Address, bool] = {}  # whether the worker halves do not know it yet

    def end_of(self, request: RequestView, start: int) -> int:
        parameters = _parameters(request)
        count = parameters.get("remote_num_tokens")
        if parameters.get("do_remote_prefill") is not True or type(count) is not int:
            return start
        if (
            request.num_preemptions
            or not self._is_reachable(parameters)
            or not self._is_same(request)
        ):
            return start
        return max(start, min(self.longest(request), count // self.alignment * self.alignment))

    def allocated(self, request: RequestView, blocks: BlockView, num_external_tokens: int) -> None:
        super().allocated(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._sources[request.key] = _address(_parameters(request))

    def saves(self, request: RequestView) -> bool:
        return _parameters(request).get("do_remote_decode") is True

    def saved(self, request: RequestView, places: Sequence[Place]) -> None:
        parameters = _parameters(request)
        target = _address(parameters)
        if target is not None and self._is_reachable(parameters):
            self._targets += [(place.group, place.block_hash, target) for place in places]

    def parameters_of(self, request: RequestView) -> dict[str, Any]:
        host, port = self._address
        parameters = _parameters(request)
        is_sent = _address(parameters) is not None and self._is_reachable(parameters)
        where = {} if is_sent else {"remote_host": host, "remote_port": port}
        return {
            **super().parameters_of(request),
            **where,
            "remote_num_tokens": self.full_tokens(request),
            "remote_first_hash": request.block_hashes[0].hex() if request.block_hashes else "",
        }

    def plan(self, batch: Batch) -> bytes:
        transfers = super().plan(batch)
        strangers = [address for address, is_new in self._strangers.items() if is_new]
        self._strangers |= dict.fromkeys(strangers, False)
        plan = Plan(transfers, self._sources, self._targets, strangers)
        self._sources = {}
        self._targets = []
        return encode(plan)

    def _is_reachable(self, parameters: Mapping[str, Any]) -> bool:
        """Return whether the address book has the host that a request names, if it names one."""
        host = parameters.get("remote_host")
        if host is None or (_address(parameters) is not None and self._book.has(host)):
            return True
        (log.debug if self._is_warned else log.warning)(
            "a request names the engine %.80r (port %.20r), which is not one of the peers; its "
            "prompt is computed. If the host is right, add it to the option peers",
            host,
            parameters.get("remote_port"),
        )
        self._is_warned = True
        return False

    def _is_same(self, request: RequestView) -> bool:
        """Return whether the first block has the same name in both engines. Otherwise, the other
        engine has none of the blocks, and asking for them would take until the timeout."""
        parameters = _parameters(request)
        if not request.block_hashes:
            return True
        if parameters.get("remote_first_hash") == request.block_hashes[0].hex():
            return True
        address = _address(parameters)
        is_new = address not in self._strangers and len(self._strangers) < MAX_STRANGERS
        if address is not None and is_new:
            self._strangers[address] = True
        return False


def _parameters(request: RequestView) -> Mapping[str, Any]:
    return request.kv_transfer_params or {}


def _address(parameters: Mapping[str, Any]) -> Address | None:
    host = parameters.get("remote_host")
    port = parameters.get("remote_port")
    if isinstance(host, str) and type(port) is int and 0 < port < 65536:
        return host, port
    return None
