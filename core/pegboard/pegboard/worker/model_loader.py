"""Fills a model from a checkpoint: declare → load → finish, layer by layer.

Pieces are streamed in file order. A layer is finished as soon as it has its last piece, so the peak
memory is that of the finished weights plus one layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from pegboard.config.schema import EngineConfig
from pegboard.env import cache_dir
from pegboard.errors import EngineDeadError, ModelError, expect
from pegboard.interfaces.quantization import DividedMethod, RepackCache
from pegboard.interfaces.weight_loader import (
    Checkpoint,
    WantedWeight,
    WeightLoader,
    WeightPiece,
    joined,
)
from pegboard.layers import Layer
from pegboard.log import get_logger
from pegboard.plan.weight_update import FLOATS
from pegboard.worker.memory import check_room

log = get_logger(__name__)

Declared = Mapping[Layer, list[WantedWeight]]
"""The tensors that each layer needs."""

SHOWN = 8
"""Number of names that an error lists at most."""


def wanted_of(declared: Declared) -> dict[str, WantedWeight]:
    """Return the tensors that the layers need, by name."""
    return joined(weight for weights in declared.values() for weight in weights)


def check_memory(
    declared: Declared, checkpoint: Checkpoint, asked: str | None, free_bytes: int
) -> None:
    """Raise ConfigError if the tensors that the layers need take more than `free_bytes` in the
    checkpoint's files. asked: the user's quantization method. Plain weights become smaller by it
    while they are loaded, so they are not checked then."""
    if checkpoint.quantization or asked is None:
        names = wanted_of(declared).keys() & checkpoint.tensors.keys()
        needed = sum(checkpoint.tensors[name].num_bytes for name in names)
        check_room(
            f"the weights of {checkpoint.path}",
            needed,
            free_bytes,
            "use a smaller model, or one with fewer bits",
        )


def fill_layers(
    declared: Declared, loader: WeightLoader, checkpoint: Checkpoint, *, only_finite: bool = False
) -> None:
    """Give declared layers their pieces, for the first time or again. A reload writes to the same
    addresses. only_finite: NaN and infinity are errors. Raises ModelError. What `check_tensors`
    and `check_division` raise comes before anything is written."""
    check_tensors(declared, checkpoint)
    check_division(declared, loader, checkpoint)
    wanted = wanted_of(declared)
    unused = sorted(set(checkpoint.tensors) - set(wanted))
    if unused:
        log.debug("%d tensors of the checkpoint are not used: %s", len(unused), _some(unused))
    pieces = expect(loader.tensors(checkpoint, wanted.values()), Iterable, loader, "tensors")
    fill_from(declared, pieces, str(checkpoint.path), only_finite=only_finite)


def fill_from(
    declared: Declared, pieces: Iterable[WeightPiece], source: str, *, only_finite: bool
) -> None:
    """Give declared layers their pieces, which come in any order. source: where from, in words.
    only_finite: NaN and infinity are errors. Raises ModelError."""
    wanted = wanted_of(declared)
    waiting: dict[Layer, int] = {}
    owners: dict[str, list[Layer]] = {}
    for layer, weights in declared.items():
        waiting[layer] = len(weights)
        for weight in weights:
            owners.setdefault(weight.name, []).append(layer)
    is_hidden = not sys.stderr.isatty()
    for piece in tqdm(
        pieces,
        "Loading weights",
        len(wanted),
        delay=1.0,
        leave=False,
        disable=is_hidden,
        unit="tensor",
    ):
        if (
            only_finite
            and piece.stored in FLOATS
            and not _is_finite(wanted[piece.name], piece.data)
        ):
            raise ModelError(
                f"{source}: tensor {piece.name} has values that are NaN or infinite; the old "
                "weights stay"
            )
        for layer in owners.pop(piece.name):
            layer.accept(piece)
            waiting[layer] -= 1
            if not waiting[layer]:
                layer.finish()
    if owners:
        raise ModelError(f"{source} did not deliver: {_some(sorted(owners))}")


def fill_or_restore(
    fill: Callable[[Checkpoint], None], checkpoint: Checkpoint, last: Checkpoint
) -> None:
    """Fill the layers from a checkpoint. If that fails, fill them from the last one, and raise the
    error. Raises EngineDeadError if that fails too."""
    try:
        fill(checkpoint)
    except Exception:
        try:
            fill(last)
        except Exception as error:
            raise EngineDeadError(
                f"the weights are incomplete, and cannot be read again: {error}"
            ) from error
        raise


def check_tensors(declared: Declared, checkpoint: Checkpoint) -> None:
    """Raise ModelError if the checkpoint lacks tensors or has one with another shape."""
    wanted = wanted_of(declared)
    for name, weight in wanted.items():
        stored = checkpoint.tensors.get(name)
        if stored is not None and weight.shape and weight.shape != stored.shape:
            message = f"has shape {list(stored.shape)}; the model expects {list(weight.shape)}"
            raise ModelError(f"{checkpoint.path}: tensor {name} {message}")
    missing = sorted(set(wanted) - set(checkpoint.tensors)) if checkpoint.tensors else []
    if missing:
        raise ModelError(
            f"{checkpoint.path} lacks {len(missing)} tensors that the model needs: {_some(missing)}"
        )


def check_division(declared: Declared, loader: WeightLoader, checkpoint: Checkpoint) -> None:
    """Raise ModelError if ranks cannot divide a weight as its layer does. Of the weights' data,
    only the tensors that say this are read."""
    first = [weight for weight in wanted_of(declared).values() if weight.is_first]
    pieces = {piece.name: piece for piece in (loader.tensors(checkpoint, first) if first else ())}
    for layer in declared:
        for holder in layer.holders():
            if isinstance(holder, DividedMethod):
                holder.check_division(checkpoint.tensors, pieces)


def repack_cache(config: EngineConfig, checkpoint: Checkpoint) -> RepackCache | None:
    """Return the place for repacked weights of this checkpoint, or None if they are not kept."""
    if not config.repack_cache_gb or not checkpoint.digest:
        return None
    folder = Path(config.download_dir).expanduser() if config.download_dir else cache_dir()
    return RepackCache(folder / "repacked", checkpoint.digest, int(config.repack_cache_gb * 2**30))


def _is_finite(weight: WantedWeight, data: Any) -> bool:
    """Return whether the values are finite that this rank reads."""
    parts = [data[tuple(slice(*span) for span in box)] for box in weight.boxes]
    return all(bool(torch.isfinite(part).all()) for part in parts or [data])


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
