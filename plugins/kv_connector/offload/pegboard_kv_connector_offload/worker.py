"""The worker half: copies blocks between the KV memory and a memory of slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pegboard.data.batch import TransferReport
from pegboard.interfaces.attention import KVGroup, KVView
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_kv.plan import Place, TransferPlan, decode
from pegboard_kv_connector_offload.options import OffloadOptions
from pegboard_kv_connector_offload.slots import Slots, make_slots


class OffloadWorker:
    """Saves and loads in the step. Later steps are in order with both, so nothing has to be waited
    for, and the blocks of a request are free when the step that saves them has begun."""

    _slots: Slots

    def __init__(self, options: OffloadOptions, setup: KVConnectorSetup) -> None:
        self._num_slots = options.num_slots(setup.plan)
        self._copies = setup.copies
        self._plan = TransferPlan()

    def register(self, views: Mapping[int, KVView], groups: Sequence[KVGroup]) -> None:
        self._slots = make_slots(self._num_slots, views, groups, self._copies)

    def save(self, plan: bytes) -> None:
        self._plan = decode(plan)
        _for_groups(self._plan.saves, self._slots.save)

    def begin(self, plan: bytes) -> None:
        for places in self._plan.loads.values():
            _for_groups(places, self._slots.load)

    def end(self) -> TransferReport:
        return TransferReport(saved=self._plan.released, loaded=list(self._plan.loads), failed={})

    def close(self) -> None:
        """The memory goes with the object."""


def _for_groups(places: Sequence[Place], copy: Callable[[int, Sequence[Place]], None]) -> None:
    groups: dict[int, list[Place]] = {}
    for place in places:
        groups.setdefault(place.group, []).append(place)
    for group, each in groups.items():
        copy(group, each)
