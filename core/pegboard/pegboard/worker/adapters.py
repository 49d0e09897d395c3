"""The LoRA adapters that this rank keeps in memory: read by a thread, checked, and copied into a
slot between steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from pegboard.data.request import LoRARequest
from pegboard.errors import ModelError, PegboardError
from pegboard.interfaces.weight_loader import Checkpoint, WeightLoaderSpec
from pegboard.layers import Experts, Layer
from pegboard.layers.lora import AdapterSlots, Fitted, Weights
from pegboard.plugins.importing import import_part
from pegboard.plugins.registry import Registry

NUM_THREADS = 2
"""Adapters that are read at the same time, so that one slow disk does not hold up the others."""


class Adapters:
    """layers: of the model. read: returns the factor of an adapter's products, and its weights.
    absent: the paths of the model's modules that other ranks have. aliases: see `Declared`. An
    adapter is named by the engine's ticket."""

    def __init__(
        self,
        layers: Iterable[Layer],
        read: Callable[[LoRARequest], tuple[float, Weights]],
        absent: Iterable[str] = (),
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        layers = list(layers)
        self._aliases = aliases or {}
        self._absent = tuple(f"{path}." for path in absent)
        self._experts = [layer for layer in layers if isinstance(layer, Experts)]
        adapters = [getattr(layer, "adapters", None) for layer in layers]
        self._fixed = {layer.build.path for layer in layers} - {
            layer.build.path for layer, each in zip(layers, adapters, strict=True) if each
        } | {name.rpartition(".")[0] for layer in layers[:1] for name in layer.build.stored}
        self._slots = [slots for slots in adapters if isinstance(slots, AdapterSlots)]
        self._slots += [slots for layer in self._experts for slots in layer.adapters]
        self._read = read
        self._threads = ThreadPoolExecutor(NUM_THREADS, "pegboard-adapters")
        self._adapters: dict[int, Future[tuple[str, list[Fitted]]]] = {}

    def read(self, ticket: int, lora: LoRARequest) -> tuple[str, str] | None:
        """Start to read an adapter. Return None until that has ended, and then its digest, or ""
        and why it cannot be used."""
        future = self._adapters.get(ticket)
        if future is None:
            future = self._adapters[ticket] = self._threads.submit(self._fitted, lora)
        if not future.done():
            return None
        try:
            return future.result()[0], ""
        except PegboardError as error:
            return "", str(error)
        except Exception as error:  # noqa: BLE001  a plugin's code read the files of a user
            return "", f"{type(error).__name__}: {error}"

    def load(self, slot: int, ticket: int) -> None:
        """Copy an adapter that was read into a slot of every layer."""
        for layer, fitted in zip(self._slots, self._adapters[ticket].result()[1], strict=True):
            layer.load(slot, fitted)

    def drop(self, tickets: Iterable[int]) -> None:
        """Forget adapters. Their slots stay as they are until others are copied into them."""
        for ticket in tickets:
            if (future := self._adapters.pop(ticket, None)) is not None:
                future.cancel()

    def close(self) -> None:
        """End the threads when they have read what they are reading."""
        self._adapters.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @torch.inference_mode()
    def _fitted(self, lora: LoRARequest) -> tuple[str, list[Fitted]]:
        """Read an adapter. Return its digest, and its weights as each layer stores them. Raises
        ModelError if it does not fit."""
        scaling, weights = self._read(lora)
        digest = digest_of(scaling, weights)
        weights = {self._path(name): matrices for name, matrices in weights.items()}
        for layer in self._experts:
            weights = layer.unstacked(weights)
        known = {name for slots in self._slots for name, _ in slots.modules}
        unknown = sorted(
            name for name in weights.keys() - known if not f"{name}.".startswith(self._absent)
        )
        if unknown:
            raise ModelError(
                f"it changes modules that this model does not have: {', '.join(unknown[:5])}"
                if self._fixed.isdisjoint(unknown)
                else f"it changes {', '.join(unknown[:5])}; heads for classes take no "
                "adapters, and neither do encoders of images or sound, nor modules "
                "that are not linear layers of their own"
            )
        return digest, [slots.fitted(weights, scaling) for slots in self._slots]

    def _path(self, name: str) -> str:
        """Return the path of a module that an adapter names."""
        for alias, path in self._aliases.items():
            if name.startswith(f"{alias}."):
                return path + name.removeprefix(alias)
        return self._aliases.get(name, name)


def read_files(registry: Registry, base: Checkpoint, adapter: LoRARequest) -> Any:
    """Read an adapter with the first weight loader that reads adapters in files like those in its
    folder. base: the checkpoint of the model that it changes. Raises ModelError."""
    folder = Path(adapter.lora_path)
    for entry in registry.entries("weight_loader"):
        spec = registry.spec(entry)
        assert isinstance(spec, WeightLoaderSpec)
        if spec.adapters is not None and any(
            next(folder.glob(pattern), None) for pattern in spec.file_patterns
        ):
            return import_part(entry, spec.adapters, "adapters")(folder, base)
    message = (
        "no installed weight loader reads the adapter in"
        if folder.is_dir()
        else "there is no folder"
    )
    raise ModelError(f"{message} {folder}")


def digest_of(scaling: float, weights: Weights) -> str:
    """Return a hash of an adapter's values."""
    digest = hashlib.sha256(repr(scaling).encode())
    for name in sorted(weights):
        digest.update(name.encode())
        for matrix in weights[name]:
            digest.update(f"{matrix.dtype}{list(matrix.shape)}".encode())
            digest.update(matrix.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]
