"""The memory of a weight: what it names, and what else can be reached from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

LEAVES = (str, bytes, int, float, type, FunctionType, ModuleType, type(None))


def held_bytes(weight: Any) -> int:
    """Return the bytes of the tensors that a weight names."""
    return sum(tensor.element_size() * tensor.numel() for tensor in weight.tensors())


def unnamed_bytes(weight: Any) -> int:
    """Return the bytes of all tensors that can be reached from a weight through attributes and
    collections, without those that it names. They stay while the engine sleeps."""
    named = set(_storages(weight.tensors()))
    sizes = _storages(_reachable(weight))
    return sum(size for address, size in sizes.items() if address not in named)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the number of bytes of each storage, by address."""
    storages = [t.untyped_storage() for t in tensors if t.layout is torch.strided]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _reachable(root: Any) -> Iterator[Tensor]:
    seen: dict[int, Any] = {}  # with the objects, so that no id is used again
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, LEAVES):
            continue
        seen[id(item)] = item
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
        else:
            slots = chain.from_iterable(getattr(b, "__slots__", ()) for b in type(item).__mro__)
            waiting += getattr(item, "__dict__", {}).values()
            waiting += [getattr(item, name, None) for name in slots if isinstance(name, str)]
