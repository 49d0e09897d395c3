"""Which LoRA adapter sits in which of the worker's slots. Slot 0 is the base model; adapters use 1 … max_loras.

An adapter that a running request uses is held: it never loses its slot, so no batch can want more than `max_loras` adapters. Of
the others the least recently used one makes room.
"""

from __future__ import annotations

from collections import OrderedDict

from pegboard.data.request_parts import AdapterRef
from pegboard.errors import RequestError

BASE_SLOT = 0


class LoRASlots:
    """Called by the scheduler: `assign` when a request is admitted, `release` when it leaves its row."""

    def __init__(self, max_loras: int) -> None:
        self.max_loras = max_loras
        self._free = list(range(max_loras, 0, -1))
        self._slots: OrderedDict[int, int] = OrderedDict()  # lora_id → slot, least recently used first
        self._num_users: dict[int, int] = {}
        self._pinned: set[int] = set()
        self._loads: list[tuple[int, AdapterRef]] = []

    def assign(self, adapter: AdapterRef) -> int | None:
        """The adapter's slot, held until `release`; loaded before the next batch if it is new. None = all slots are held by
        other adapters: the request waits."""
        lora_id = adapter.lora_id
        slot = self._slots.get(lora_id)
        if slot is None:
            slot = self._free.pop() if self._free else self._evict()
            if slot is None:
                return None
            self._slots[lora_id] = slot
            self._loads.append((slot, adapter))
        self._slots.move_to_end(lora_id)
        self._num_users[lora_id] = self._num_users.get(lora_id, 0) + 1
        return slot

    def release(self, adapter: AdapterRef) -> None:
        """One user less."""
        self._num_users[adapter.lora_id] -= 1
        if not self._num_users[adapter.lora_id]:
            del self._num_users[adapter.lora_id]

    def slot_of(self, adapter: AdapterRef | None) -> int:
        """Slot of a held adapter; 0 for the base model."""
        return BASE_SLOT if adapter is None else self._slots[adapter.lora_id]

    def pin(self, lora_id: int) -> None:
        """Keep a resident adapter although nobody uses it. RequestError when it is not resident, or the last free slot."""
        if lora_id not in self._slots:
            raise RequestError(f"adapter {lora_id} is not loaded; send a request with it first", parameter="lora_id")
        if len(self._pinned | {lora_id}) >= self.max_loras:
            raise RequestError(f"pinning adapter {lora_id} would leave no slot for others (max_loras={self.max_loras})")
        self._pinned.add(lora_id)

    def take_loads(self) -> tuple[tuple[int, AdapterRef], ...]:
        """(slot, adapter) pairs to load before the next forward."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def _evict(self) -> int | None:
        for lora_id in self._slots:
            if lora_id not in self._num_users and lora_id not in self._pinned:
                return self._slots.pop(lora_id)
        return None
