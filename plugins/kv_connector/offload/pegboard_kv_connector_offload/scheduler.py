"""The scheduler half: which block is in which slot, and which one makes room. It imports no
torch."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.errors import ConfigError
from pegboard.interfaces.kv_connector import KVConnectorSetup, MemoryEvents
from pegboard.interfaces.scheduling_policy import RequestView
from pegboard_kv.plan import Place
from pegboard_kv.scheduler import StoreScheduler
from pegboard_kv_connector_offload.arc import Arc
from pegboard_kv_connector_offload.lru import Eviction, Lru, Name
from pegboard_kv_connector_offload.options import OffloadOptions

MEDIUM = "CPU"
"""vLLM's name for the memory of the host, in KV events."""


class Slots:
    """The `BlockStore` of numbered slots. A slot that the next plan names is not given away,
    because the worker half saves before it loads and would overwrite what it is to load. events: is
    told which blocks are dropped."""

    def __init__(
        self, num_slots: int, eviction: Eviction, events: MemoryEvents | None = None
    ) -> None:
        self._eviction = eviction
        self._events = events
        self._slots: dict[Name, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._named: set[int] = set()

    def find(self, group: int, block_hash: bytes) -> int | None:
        return self._slots.get((group, block_hash))

    def use(self, group: int, block_hash: bytes) -> int:
        slot = self._slots[group, block_hash]
        self._eviction.used((group, block_hash))
        self._named.add(slot)
        return slot

    def reserve(self, group: int, block_hash: bytes) -> int | None:
        name = (group, block_hash)
        if name in self._slots:
            self._eviction.used(name)
            return None
        slot = self._free.pop() if self._free else self._evict(name)
        if slot is not None:
            self._eviction.added(name)
            self._slots[name] = slot
            self._named.add(slot)
        return slot

    def _evict(self, name: Name) -> int | None:
        """Drop a block for `name`. Return None if the next plan names all slots."""
        victim = self._eviction.make_room(name, lambda old: self._slots[old] not in self._named)
        if victim is None:
            return None
        if self._events is not None:
            self._events.removed(*victim)
        return self._slots.pop(victim)

    def sent(self) -> None:
        self._named.clear()


class OffloadScheduler(StoreScheduler):
    """Loads in the step that computes the rest, because copying in memory is fast."""

    def __init__(self, options: OffloadOptions, setup: KVConnectorSetup) -> None:
        num_slots = options.num_slots(setup.plan)
        if num_slots < 1:
            raise ConfigError(
                f"the memory of offload is smaller than a KV block of {setup.plan.block_bytes} "
                "bytes; give it more"
            )
        eviction = Arc(num_slots) if options.eviction_policy == "arc" else Lru()
        self._events = setup.events(MEDIUM) if setup.events is not None else None
        super().__init__(setup, Slots(num_slots, eviction, self._events), load="in_step")

    def saved(self, request: RequestView, places: Sequence[Place]) -> None:
        if self._events is None:
            return
        indices: dict[int, list[int]] = {}
        for place in places:
            index = place.first_token // self._sizes[place.group]
            indices.setdefault(place.group, []).append(index)
        for group, each in indices.items():
            self._events.stored(request, group, each)
