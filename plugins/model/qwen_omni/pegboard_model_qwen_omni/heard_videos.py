"""Videos with their sound: in which order the tokens of both follow each other, and their
positions. This module does not import torch, because processors read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Joined:
    """order: of the tokens, those of the video first and then those of the sound, int64 [tokens].
    positions: of each token in this order, on three axes, from the first one on. last: the largest
    position among the tokens that the model counts as the last ones."""

    order: np.ndarray
    positions: np.ndarray
    last: int


@dataclass(frozen=True)
class Seen:
    """shape: frames, lines and columns of tokens. interval: seconds from one frame to the next.
    rate: positions of a second."""

    shape: tuple[int, int, int]
    interval: float
    rate: float

    def times(self) -> np.ndarray:
        """Return when each token is seen, float64 [tokens], in positions."""
        return np.indices(self.shape)[0].flatten() * self.interval * self.rate

    def positions(self) -> np.ndarray:
        """Return the positions of each token, int64 [3, tokens]."""
        positions = np.indices(self.shape).reshape(3, -1).astype(np.int64)
        times = positions[0].astype(np.float32) * np.float32(self.interval) * np.float32(self.rate)
        positions[0] = times.astype(np.int64)
        return positions


def by_chunks(seen: Seen, count: int, seconds: float) -> Joined:
    """The order of Qwen2.5-Omni: what is seen in some seconds, what is heard in them, and so on.
    count: tokens of the sound, one for each position."""
    size = int(seen.rate * seconds)
    times = seen.times()
    num_seen = len(times)
    heard = np.arange(count)
    chunks = [list(spans(times, size)), list(spans(heard, size))]
    parts: list[np.ndarray] = []
    for number in range(max(map(len, chunks))):
        for first, each in zip((0, num_seen), chunks, strict=True):
            if number < len(each):
                parts.append(np.arange(*each[number]) + first)
    every = np.concatenate([seen.positions(), np.tile(heard, (3, 1))], 1)
    order = np.concatenate(parts)
    return Joined(order, every[:, order], int(every[:, parts[-1]].max()))


def spans(times: np.ndarray, size: int) -> Iterator[tuple[int, int]]:
    """Yield where each chunk begins and ends, as transformers cuts them: where frames are further
    apart than a chunk, the next tokens are chunks of their own."""
    start = 0
    end = size
    for index, time in enumerate(times):
        if time >= end:
            yield start, index
            start = index
            end += size
    yield start, len(times)


def by_time(seen: Seen, count: int) -> Joined:
    """The order of Qwen3-Omni: each token at its time, those that are seen first. count: tokens of
    the sound, one for each position."""
    times = seen.times()
    heard = np.arange(count)
    order = np.argsort(np.concatenate([times, heard]), kind="stable")
    every = np.concatenate([seen.positions(), np.tile(heard, (3, 1))], 1)
    is_heard = order >= len(times)
    alone = len(order) - int(np.argmax(is_heard[::-1] != is_heard[-1]))
    return Joined(order, every[:, order], int(every[:, order[alone:]].max()))
