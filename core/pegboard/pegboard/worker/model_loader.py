"""Fills a model from a checkpoint: declare → load → finish, layer by layer.

Pieces stream in file order; a layer is finished as soon as its last piece is there, so the peak is one layer above the
finished weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import Checkpoint, WantedWeight, WeightLoader, WeightPiece
from pegboard.layers import Layer
from pegboard.log import get_logger

log = get_logger(__name__)

SHOWN = 8
"""Most names listed in an error."""


def load_weights(layers: Iterable[Layer], loader: WeightLoader, checkpoint: Checkpoint) -> None:
    """Give every declared layer its pieces. Raises ModelError naming tensors that the checkpoint lacks."""
    waiting: dict[Layer, int] = {}
    owners: dict[str, list[Layer]] = {}
    wanted: dict[str, WantedWeight] = {}
    for layer in layers:
        own = layer.declare(checkpoint.tensors)
        waiting[layer] = len(own)
        for weight in own:
            owners.setdefault(weight.name, []).append(layer)
            wanted[weight.name] = weight
    missing = sorted(set(wanted) - set(checkpoint.tensors)) if checkpoint.tensors else []
    if missing:
        raise ModelError(f"{checkpoint.path} lacks {len(missing)} tensors that the model needs: {_some(missing)}")
    unused = sorted(set(checkpoint.tensors) - set(wanted))
    if unused:
        log.debug("%d tensors of the checkpoint are not used: %s", len(unused), _some(unused))
    for piece in _with_progress(loader.tensors(checkpoint, wanted.values()), len(wanted)):
        for layer in owners.pop(piece.name):
            layer.accept(piece)
            waiting[layer] -= 1
            if not waiting[layer]:
                layer.finish()
    if owners:
        raise ModelError(f"the weight loader {checkpoint.format!r} did not deliver: {_some(sorted(owners))}")


def bind_layers(layers: Iterable[Layer]) -> None:
    """Compose every layer's forward; after this a model may run."""
    for layer in layers:
        layer.bind()


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _with_progress(pieces: Iterator[WeightPiece], total: int) -> Iterator[WeightPiece]:
    """The pieces, with a bar on a terminal once loading takes over a second."""
    from tqdm import tqdm

    yield from tqdm(pieces, "Loading weights", total, delay=1.0, leave=False, disable=not sys.stderr.isatty(), unit="tensor")
