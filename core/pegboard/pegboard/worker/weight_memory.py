"""The memory of the weights while the engine sleeps: it is found, released, and filled again at the
same addresses."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.layers import Layer
from pegboard.layers.build import Build


class WeightMemory:
    """The memory of the weights of loaded and bound layers.

    release: `ReleasingPlatform.release`. reload: gives the layers their pieces again.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        release: Callable[..., Callable[[], None]],
        reload: Callable[[], None],
    ) -> None:
        self._layers = list(layers)
        self._release = release
        self._reload = reload
        self._restore: Callable[[], None] | None = None
        self._sums: list[int] | None = None

    def tensors(self) -> list[Tensor]:
        """Return one uint8 tensor [bytes] per memory area that a weight or a small tensor of a
        layer uses."""
        return list(_areas(root for layer in self._layers for root in layer.holders()))

    def sleep(self, level: int) -> None:
        """Release the memory. level 1: the weights are saved before; 2: they are not."""
        areas = self.tensors()
        self._sums = [_checksum(area) for area in areas] if level == 2 else None
        self._restore = self._release(areas, keep=level == 1)

    def wake_up(self) -> None:
        """Take the memory again, with the same weights. Raises ModelError if the checkpoint does
        not give the same weights."""
        assert self._restore is not None, "the weights are not asleep"
        self._restore()
        if self._sums is not None:
            self._reload()
            if [_checksum(area) for area in self.tensors()] != self._sums:
                raise ModelError(
                    "the weights differ from those before the sleep: the checkpoint has changed, "
                    "or a layer keeps values that are not in it; restart the engine, and use "
                    "sleep level 1"
                )
        self._restore = self._sums = None


def _checksum(area: Tensor) -> int:
    numbers: Any = area.cpu().numpy()
    return zlib.crc32(numbers)


def _areas(roots: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the storages of all tensors and arrays that can be reached from these objects, each
    once, as uint8 [bytes]."""
    seen: set[int] = set()
    # an object that is made while searching must not give its id to the next one
    alive: list[Any] = []
    waiting = list(roots)
    areas: set[int] = set()
    while waiting:
        item = waiting.pop()
        if (
            id(item) in seen
            or item is None
            or isinstance(item, str | bytes | int | float | type | Build | np.generic)
        ):
            continue
        seen.add(id(item))
        alive.append(item)
        if isinstance(item, np.ndarray):
            if not item.flags.writeable or not item.flags.c_contiguous:
                continue
            item = torch.from_numpy(item)
        if isinstance(item, Tensor):
            if (
                item.layout is torch.strided
                and (storage := item.untyped_storage()).data_ptr() not in areas
            ):
                areas.add(storage.data_ptr())
                yield torch.empty(0, dtype=torch.uint8, device=item.device).set_(storage)
        else:
            waiting += _parts(item)


def _parts(item: Any) -> Iterable[Any]:
    """Return the objects that an object holds. What a function is bound to is not followed."""
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, list | tuple | set | frozenset):
        return item
    slots = chain.from_iterable(getattr(base, "__slots__", ()) for base in type(item).__mro__)
    return [
        *getattr(item, "__dict__", {}).values(),
        *(getattr(item, name, None) for name in slots if isinstance(name, str)),
    ]
