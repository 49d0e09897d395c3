"""Fills a model from a checkpoint: declare → load → finish, layer by layer.

Pieces stream in file order; a layer is finished as soon as its last piece is there, so the peak is one layer above the
finished weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import Checkpoint, WeightLoader, WeightPiece, WeightSlice
from pegboard.layers import Layer
from pegboard.log import get_logger

log = get_logger(__name__)

SHOWN = 8
"""Most names listed in an error."""


def load_weights(layers: Iterable[Layer], renames: Mapping[str, str], loader: WeightLoader, checkpoint: Checkpoint) -> None:
    """Give every declared layer its pieces. Raises ModelError naming tensors that the checkpoint lacks.

    renames: checkpoint name prefixes to read instead ({"model.": "transformer."} reads transformer.x for model.x).
    """
    layers = list(layers)
    waiting: dict[Layer, int] = {}
    owners: dict[str, list[Layer]] = {}
    slices: dict[str, WeightSlice] = {}
    for layer in layers:
        wanted = list(layer.declare(checkpoint.tensors))
        waiting[layer] = len(wanted)
        for part in wanted:
            owners.setdefault(part.name, []).append(layer)
            slices[part.name] = part
    stored = {_stored_name(name, renames): name for name in slices}
    missing = sorted(set(stored) - set(checkpoint.tensors)) if checkpoint.tensors else []
    if missing:
        raise ModelError(f"{checkpoint.path} lacks {len(missing)} tensors that the model needs: {_some(missing)}")
    unused = sorted(set(checkpoint.tensors) - set(stored))
    if unused:
        log.debug("%d tensors of the checkpoint are not used: %s", len(unused), _some(unused))
    wanted_slices = [_renamed(slices[name], source) for source, name in stored.items()]
    for piece in _with_progress(loader.tensors(checkpoint, wanted_slices), len(wanted_slices)):
        name = stored[piece.name]
        piece.name = name
        for layer in owners.pop(name):
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


def _stored_name(name: str, renames: Mapping[str, str]) -> str:
    for prefix, stored in renames.items():
        if name.startswith(prefix):
            return stored + name.removeprefix(prefix)
    return name


def _renamed(piece: WeightSlice, name: str) -> WeightSlice:
    return piece if piece.name == name else replace(piece, name=name)


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _with_progress(pieces: Iterator[WeightPiece], total: int) -> Iterator[WeightPiece]:
    """The pieces, with a bar on a terminal once loading takes over a second."""
    from tqdm import tqdm

    yield from tqdm(pieces, "Loading weights", total, delay=1.0, leave=False, disable=not sys.stderr.isatty(), unit="tensor")
