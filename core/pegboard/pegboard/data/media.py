"""Images, audio and video in a prompt, as the front sends them to the engine. This file does not
import numpy, because the API process loads it at once."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class MediaArray(msgspec.Struct, frozen=True):
    """data: the numbers one after the other, little-endian. dtype: numpy's name of their type."""

    data: bytes
    dtype: str
    shape: tuple[int, ...]


class MediaItem(msgspec.Struct, frozen=True):
    """One item. modality: "image", "audio" or "video". digest: of what the item is and how it was
    processed; items with the same digest have the same rows. places: (first position, number) of
    the positions in the prompt whose rows the model's `encode` makes, in the order of the rows.
    arrays: what `encode` gets."""

    modality: str
    digest: str
    places: tuple[tuple[int, int], ...]
    arrays: Mapping[str, MediaArray]

    @property
    def num_rows(self) -> int:
        return sum(count for _, count in self.places)

    @property
    def start(self) -> int:
        """The first of these positions."""
        return self.places[0][0]

    @property
    def stop(self) -> int:
        """The position after the last one."""
        first, count = self.places[-1]
        return first + count
