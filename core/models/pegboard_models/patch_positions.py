"""The positions of tokens on three axes. This module does not import torch, because processors read
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pegboard.interfaces.multimodal_processor import PlacedItem
from pegboard_models.patch_sizes import AXES


def offsets(num_tokens: int, items: Sequence[PlacedItem]) -> Mapping[str, Sequence[int]]:
    """Return how far the positions of each token are from its place. Each grid of an item has a
    time for each of its frames, and a position for each line and each column; the text goes on
    after the largest of them. The facts of an item may have "grids": (first token, (frames, height,
    width) in tokens) of each, "interval": between the times of frames, and "rate": the positions
    of a unit of time. Or they have "positions", int64 [3, tokens], from the one on that the item's
    first token would have as text, and "next", that of the token after the item. Tokens of other
    items are counted like text."""
    moved = np.zeros((len(AXES), num_tokens), np.int64)
    behind = 0
    for item in items:
        if (positions := item.facts.get("positions")) is not None:
            count = positions.shape[1]
            end = item.start + count
            moved[:, item.start : end] = positions - np.arange(count) - behind
            behind += count - item.facts["next"]
            moved[:, end:] = -behind
            continue
        interval = np.float32(item.facts.get("interval", 1.0))
        rate = np.float32(item.facts.get("rate", 1.0))
        for first, shape in item.facts.get("grids", ()):
            positions = np.indices(shape).reshape(len(AXES), -1)
            times = positions[0].astype(np.float32) * interval * rate
            positions[0] = times.astype(np.int64)
            count = positions.shape[1]
            start = item.start + first
            places = np.arange(count)
            moved[:, start : start + count] = positions - places - behind
            behind += count - int(positions.max()) - 1
            moved[:, start + count :] = -behind
    return {name: axis.tolist() for name, axis in zip(AXES, moved, strict=True)}
