"""The adaptive replacement cache (N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead
Replacement Cache", FAST 2003). It imports no torch.

Blocks that were used once and blocks that were used several times are in two lists. A scan, many
blocks that are used once, can only push out blocks of the first list. Each list also remembers the
names of blocks that it has lost. If a lost block of a list comes back, the list was too short, and
its share of the memory grows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from pegboard_kv_connector_offload.lru import Name, oldest


class Arc:
    """num_slots: blocks that can be stored. It also remembers as many names of blocks that are no
    longer stored.

    In the paper, `_once` is T1, `_often` T2, `_lost_once` B1, `_lost_often` B2 and `_target` p."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._once: OrderedDict[Name, None] = OrderedDict()
        self._often: OrderedDict[Name, None] = OrderedDict()
        self._lost_once: OrderedDict[Name, None] = OrderedDict()
        self._lost_often: OrderedDict[Name, None] = OrderedDict()
        self._target = 0.0

    def used(self, name: Name) -> None:
        self._once.pop(name, None)
        self._often[name] = None
        self._often.move_to_end(name)

    def make_room(self, name: Name, may_go: Callable[[Name], bool]) -> Name | None:
        """If no block of the list that is to lose one may go, one of the other list goes."""
        target = self._target_after(name)
        num_once = len(self._once)
        loses_once = num_once > target or (name in self._lost_often and num_once == target)
        lists = [self._once, self._often] if loses_once else [self._often, self._once]
        victim = oldest(lists[0], may_go) or oldest(lists[1], may_go)
        if victim is None:
            return None
        self._target = target
        is_remembered = True
        if name not in self._lost_once and name not in self._lost_often:
            is_remembered = self._forget()
        if victim in self._once:
            del self._once[victim]
            if is_remembered:
                self._lost_once[victim] = None
        else:
            del self._often[victim]
            self._lost_often[victim] = None
        return victim

    def _target_after(self, name: Name) -> float:
        """Return how many blocks that were used once are to be stored, when `name` comes."""
        num_once = len(self._lost_once)
        num_often = len(self._lost_often)
        if name in self._lost_once:
            return min(self._num_slots, self._target + max(1.0, num_often / num_once))
        if name in self._lost_often:
            return max(0.0, self._target - max(1.0, num_once / num_often))
        return self._target

    def _forget(self) -> bool:
        """Make room among the names for one that is new. Return whether the block that makes room
        is remembered: it is not if all blocks were used once."""
        if len(self._once) == self._num_slots:
            return False
        if len(self._once) + len(self._lost_once) == self._num_slots:
            self._lost_once.popitem(last=False)
        elif self._num_names() == 2 * self._num_slots:
            self._lost_often.popitem(last=False)
        return True

    def _num_names(self) -> int:
        lists = (self._once, self._often, self._lost_once, self._lost_often)
        return sum(map(len, lists))

    def added(self, name: Name) -> None:
        """A block that was lost and came back was used several times."""
        is_back = name in self._lost_once or name in self._lost_often
        self._lost_once.pop(name, None)
        self._lost_often.pop(name, None)
        (self._often if is_back else self._once)[name] = None
