"""Which LoRA adapters the workers keep in memory, and which of them have a slot. The workers only
do what is decided here.

An adapter that a running request uses never loses its slot, so no batch needs more than `max_loras`
adapters. Of the others, the least recently used one makes room. A request also protects its adapter
from the requests after it in the same scheduling pass.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import cast

import msgspec

from pegboard.config.limits import Limits
from pegboard.data.request import LoRARequest
from pegboard.engine.gates import Gate
from pegboard.engine.requests import Request
from pegboard.errors import RequestError

BASE_SLOT = 0
"""The slot of the base model."""

MAX_BYPASSES = 64
"""How many requests may get their adapter before one that waits for a slot. After that, the others
wait for it."""

POLL_S = 0.005
"""How often, in seconds, the workers are asked whether they have read an adapter."""

Key = tuple[int, str]
"""What identifies an adapter: its id and its path."""


@dataclass(eq=False, slots=True)
class Adapter:
    """Files that were read once, or are being read. lora: has a digest after they are read. ticket:
    its name in the workers. num_users: requests that have a row. is_adding: `add` waits until it is
    read, so it makes no room for others. is_stale: removed or replaced, and only kept for its
    users. last_pass: the last scheduling pass that wanted it. asked_s: when the workers were last
    asked about it."""

    lora: LoRARequest
    ticket: int
    slot: int | None = None
    num_users: int = 0
    is_pinned: bool = False
    is_adding: bool = False
    is_stale: bool = False
    last_pass: int = 0
    asked_s: float = 0.0


class LoRASlots(Gate):
    """Assigns adapters to slots 1 … max_loras, and reads at most max_cpu_loras of them.

    call: calls a worker method and returns one result per rank. Workers change adapters only
    between steps, so an adapter may have to wait for the end of the steps in flight.
    """

    def __init__(self, limits: Limits, call: Callable[..., list[object]]) -> None:
        self._executor_call = call
        self._held: dict[Request, Adapter] = {}
        self._is_idle = True
        self.must_drain = False
        self._max_loras = limits.max_loras
        self._max_read = max(limits.max_loras, limits.max_cpu_loras)
        self._free = list(range(limits.max_loras, BASE_SLOT, -1))
        self._adapters: OrderedDict[Key, Adapter] = OrderedDict()  # least recently used first
        self._tickets = count(1)
        self._num_passes = 0
        self._next: Key | None = None  # the adapter whose turn comes after MAX_BYPASSES
        self._num_bypasses = 0
        self._dropped: list[int] = []

    # --- for the scheduler ------------------------------------------------------------------------

    def begin(self, *, is_idle: bool) -> None:
        self._num_passes += 1
        self._is_idle = is_idle
        self.must_drain = False
        if is_idle and self._dropped:
            dropped = self._dropped
            self._dropped = []
            self._executor_call("drop_adapters", dropped)

    def ready(self, request: Request) -> bool:
        """Hold a slot with the request's adapter until `leave`. Return False if the request must
        wait: its adapter is being read, other requests hold all slots, or nothing can be loaded
        now. Raises RequestError if it can never be loaded."""
        if request.lora is None:
            return True
        key = _key(request.lora)
        if self._next not in (None, key) and self._num_bypasses >= MAX_BYPASSES:
            return False
        adapter = self._wanted(request.lora)
        if adapter is not None and not self._is_read(adapter):
            return False
        if adapter is None or (adapter.slot is None and not self._place(adapter)):
            if sum(other.is_pinned for other in self._adapters.values()) == self._max_loras:
                message = (
                    f"all {self._max_loras} slots have pinned adapters; raise max_loras or remove "
                    "a pinned adapter"
                )
                raise RequestError(
                    f"adapter {request.lora.lora_name!r}: {message}", parameter="lora_request"
                )
            if self._next is None:
                self._next = key
                self._num_bypasses = 0
            return False
        self._next = None if self._next == key else self._next
        self._num_bypasses += 1
        # it is read now, or was reloaded while the request was preempted
        if request.lora.digest != adapter.lora.digest:
            request.block_hashes.clear()
            request.hash_spans = None
        request.lora = adapter.lora
        self._held[request] = adapter
        adapter.num_users += 1
        return True

    def leave(self, request: Request) -> None:
        adapter = self._held.pop(request, None)
        if adapter is None:
            return
        adapter.num_users -= 1
        if adapter.is_stale and not adapter.num_users:
            self._forget(adapter)

    def ended(self, request: Request) -> None:
        """Its adapter does not wait for its turn any more."""
        if request.lora is not None and self._next == _key(request.lora):
            self._next = None

    def slot_of(self, request: Request) -> int:
        """Return the slot of the adapter of a running request, or 0 for the base model."""
        adapter = self._held.get(request)
        return BASE_SLOT if adapter is None or adapter.slot is None else adapter.slot

    def rest(self) -> None:
        if any(not adapter.lora.digest for adapter in self._adapters.values()):
            time.sleep(POLL_S)

    # --- for the engine's callers, while no step is in flight -------------------------------------

    def arrive(self, lora: LoRARequest) -> LoRARequest:
        """Return the adapter of a new request as the engine uses it. If `load_inplace` is set, its
        files will be read again."""
        adapter = self._adapters.get(_key(lora))
        if lora.load_inplace and adapter is not None and adapter.lora.digest:
            self._retire(adapter)
        return msgspec.structs.replace(lora, load_inplace=False)

    def add(self, lora: LoRARequest, *, is_idle: bool) -> bool:
        """Read an adapter. Return False while it is being read; then ask again after a step. Raises
        RequestError if it cannot be loaded, or if the adapters in memory are all in use or
        pinned."""
        self.begin(is_idle=is_idle)
        adapter = self._wanted(self.arrive(lora))
        if adapter is None:
            raise RequestError(
                (
                    f"adapter {lora.lora_name!r}: max_cpu_loras={self._max_read}, and all "
                    "adapters in memory are in use or pinned"
                ),
                parameter="lora_request",
            )
        is_read = self._is_read(adapter)
        adapter.is_adding = not is_read
        return is_read

    def remove(self, lora_id: int) -> bool:
        """Forget the adapter with this id. Running requests keep it until they end. Return False if
        there is none."""
        adapters = list(self._known(lora_id))
        for adapter in adapters:
            self._retire(adapter)
        return bool(adapters)

    def pin(self, lora_id: int) -> bool:
        """Never evict the adapter from memory or from its slot, until it is removed. Raises
        RequestError if it is not loaded, or if there are no slots left to pin."""
        adapters = list(self._known(lora_id))
        if not adapters:
            raise RequestError(
                f"no adapter with the id {lora_id} is loaded; add it first", parameter="lora_id"
            )
        pinned = {adapter.ticket for adapter in self._adapters.values() if adapter.is_pinned}
        if len(pinned | {adapter.ticket for adapter in adapters}) > self._max_loras:
            raise RequestError(
                f"all {self._max_loras} slots are pinned; remove a pinned adapter first",
                parameter="lora_id",
            )
        for adapter in adapters:
            adapter.is_pinned = True
        return True

    def ids(self) -> list[int]:
        """Return the ids of all adapters in memory."""
        return sorted(
            {adapter.lora.lora_int_id for adapter in self._adapters.values() if adapter.lora.digest}
        )

    # --- inside -----------------------------------------------------------------------------------

    def _call(self, method: str, *args: object) -> list[object] | None:
        """Call a worker method on all ranks. Return None if steps are in flight."""
        self.must_drain = not self._is_idle
        return self._executor_call(method, *args) if self._is_idle else None

    def _known(self, lora_id: int) -> Iterator[Adapter]:
        return (
            adapter for adapter in self._adapters.values() if adapter.lora.lora_int_id == lora_id
        )

    def _wanted(self, lora: LoRARequest) -> Adapter | None:
        """Return the adapter, which may have to be read first. Return None if there is no room for
        it."""
        key = _key(lora)
        adapter = self._adapters.get(key)
        if adapter is None:
            if len(self._adapters) >= self._max_read:
                unused = self._least_used(self._adapters.values())
                if unused is None:
                    return None
                self._retire(unused)
            adapter = self._adapters[key] = Adapter(
                msgspec.structs.replace(lora, digest=""), next(self._tickets)
            )
        self._adapters.move_to_end(key)
        adapter.last_pass = self._num_passes
        return adapter

    def _least_used(self, adapters: Iterable[Adapter]) -> Adapter | None:
        return next(
            (
                a
                for a in adapters
                if not (a.num_users or a.is_pinned or a.is_adding)
                and a.last_pass < self._num_passes
            ),
            None,
        )

    def _is_read(self, adapter: Adapter) -> bool:
        """Start to read the adapter, or ask how far that is. Raises RequestError if it cannot be
        read or does not fit."""
        if adapter.lora.digest:
            return True
        now = time.monotonic()
        if now < adapter.asked_s + POLL_S:
            return False
        answers = self._call("read_adapter", adapter.ticket, adapter.lora)
        if answers is None:
            return False
        adapter.asked_s = now
        if None in answers:
            return False
        for digest, reason in cast("list[tuple[str, str]]", answers):
            if reason:
                self._retire(adapter)
                raise RequestError(
                    f"adapter {adapter.lora.lora_name!r}: {reason}", parameter="lora_request"
                )
            adapter.lora = msgspec.structs.replace(adapter.lora, digest=digest)
        return True

    def _place(self, adapter: Adapter) -> bool:
        """Copy the adapter into a slot. Return False if that is not possible now."""
        if not self._free:
            unused = self._least_used(
                other for other in self._adapters.values() if other.slot is not None
            )
            if unused is None:
                return False
            self._free_slot(unused)
        if self._call("load_adapter", self._free[-1], adapter.ticket) is None:
            return False
        adapter.slot = self._free.pop()
        return True

    def _retire(self, adapter: Adapter) -> None:
        del self._adapters[_key(adapter.lora)]
        adapter.is_stale = True
        if not adapter.num_users:
            self._forget(adapter)

    def _forget(self, adapter: Adapter) -> None:
        self._free_slot(adapter)
        self._dropped.append(adapter.ticket)

    def _free_slot(self, adapter: Adapter) -> None:
        if adapter.slot is not None:
            self._free.append(adapter.slot)
            adapter.slot = None


def _key(lora: LoRARequest) -> Key:
    return lora.lora_int_id, lora.lora_path
