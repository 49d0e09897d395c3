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
    after the largest of them. The facts of an item have "grids": (first token, (frames, height,
    width) in tokens) of each, and may have "interval": between the times of frames."""
    moved = np.zeros((len(AXES), num_tokens), np.int64)
    behind = 0
    for item in items:
        interval = np.float32(item.facts.get("interval", 1.0))
        for first, shape in item.facts["grids"]:
            positions = np.indices(shape).reshape(len(AXES), -1)
            positions[0] = (positions[0].astype(np.float32) * interval).astype(np.int64)
            count = positions.shape[1]
            start = item.start + first
            places = np.arange(count)
            moved[:, start : start + count] = positions - places - behind
            behind += count - int(positions.max()) - 1
            moved[:, start + count :] = -behind
    return {name: axis.tolist() for name, axis in zip(AXES, moved, strict=True)}
