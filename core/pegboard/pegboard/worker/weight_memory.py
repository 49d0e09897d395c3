"""The memory of the weights while the engine sleeps: it is released, and filled again at the same
addresses."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pegboard.config.schema import EngineConfig
from pegboard.errors import ConfigError, ModelError
from pegboard.layers import Layer
from pegboard.worker.loaded_model import LoadedModel
from pegboard.worker.parts import WorkerSetup


def host_bytes(config: EngineConfig) -> int:
    """Return how many bytes of a rank's weights are in the host's memory."""
    return int(config.cpu_offload_gb * 2**30)


def releasable(setup: WorkerSetup, part: str) -> AbstractContextManager[object]:
    """Return a context in which memory is taken that `WorkerSetup.platform` can release later, if
    it can do so and the engine may sleep, or has a part in the host's memory. part: see
    `ReleasingPlatform`. Raises ConfigError if the platform cannot use the host's memory."""
    make = getattr(setup.platform, "releasable", None)
    on_host = host_bytes(setup.config) if part == "weights" else 0
    if on_host and make is None:
        raise ConfigError(
            f"cpu_offload_gb: the platform {setup.platform_name} cannot keep weights in the host's "
            "memory; remove the setting"
        )
    if make is None or not (on_host or setup.config.enable_sleep_mode):
        return nullcontext()
    context: AbstractContextManager[object] = make(part, on_host)
    return context


class WeightMemory:
    """The memory of the weights of loaded and bound models. release:
    `ReleasingPlatform.release`."""

    def __init__(
        self, models: Sequence[LoadedModel], release: Callable[..., Callable[[], None]]
    ) -> None:
        self._models = models
        self._release = release
        self._restore: Callable[[], None] | None = None
        self._sums: list[int] | None = None

    def tensors(self) -> list[Tensor]:
        """Return one uint8 tensor [bytes] per memory area that a weight of a layer uses."""
        return list(_areas(layer for model in self._models for layer in model.layers))

    def sleep(self, level: int) -> None:
        """Release the memory. level 1: the weights are saved before; 2: they are not. Raises
        ConfigError if they could not be read again."""
        if level == 2 and any(model.received for model in self._models):
            raise ConfigError(
                "the weights came from a trainer, so no checkpoint has them; use sleep level 1"
            )
        areas = self.tensors()
        self._sums = [_checksum(area) for area in areas] if level == 2 else None
        self._restore = self._release(areas, keep=level == 1)

    def wake_up(self) -> None:
        """Take the memory again, with the same weights. Raises ModelError if the checkpoint does
        not give the same weights."""
        assert self._restore is not None, "the weights are not asleep"
        self._restore()
        if self._sums is not None:
            for model in self._models:
                model.load()
            if [_checksum(area) for area in self.tensors()] != self._sums:
                raise ModelError(
                    "the weights differ from those before the sleep: the checkpoint has changed, "
                    "or a layer keeps values that are not in it; restart the engine, and use "
                    "sleep level 1"
                )
        self._restore = self._sums = None


def fall_asleep(
    weights: WeightMemory,
    level: int,
    cache: Sequence[Tensor],
    release: Callable[..., Callable[[], None]],
) -> dict[str, Callable[[], None]]:
    """Release the weights and the memory of the KV cache. Return what takes them again, by part. If
    one cannot be released, the other is there, too."""
    weights.sleep(level)
    try:
        restore = release(cache, keep=False)
    except BaseException:
        weights.wake_up()
        raise
    return {"weights": weights.wake_up, "kv_cache": restore}


def _checksum(area: Tensor) -> int:
    numbers: Any = area.cpu().numpy()
    return zlib.crc32(numbers)


def _areas(layers: Iterable[Layer]) -> Iterator[Tensor]:
    """Yield the storages of the layers' weights, each once, as uint8 [bytes]. Tensors whose layout
    has no addresses (oneDNN's) have none."""
    seen: set[int] = set()
    holders = (holder for layer in layers for holder in layer.holders())
    for tensor in (tensor for holder in holders for tensor in holder.tensors()):
        if tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
