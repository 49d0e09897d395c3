"""A model without weights: the next token is a hash of exactly what the model may see.

Each position stores a hash of its token, its place and its adapter. The next token is a hash of the
stored values that its KV groups let it see: all of them, a window, a chunk, or a folded state. So
one wrong slot anywhere in the history changes every later token, and `FakeModel.next_token`
computes from a plain list of tokens what a correct engine must produce.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from pegboard.data.media import MediaItem
from pegboard.interfaces.attention import (
    Chunk,
    Encoder,
    Full,
    KVCacheSpec,
    KVTensor,
    Retain,
    State,
    Window,
)


def fake_kv_spec(retain: Retain | None = None, *, slot_bytes: int = 4) -> KVCacheSpec:
    """Return what one layer of a fake model stores, for any retention rule."""
    retain = retain if retain is not None else Full()
    unit: Literal["token", "request"] = "request" if isinstance(retain, State) else "token"
    return KVCacheSpec(tensors=(KVTensor("kv", (slot_bytes,), "uint8"),), retain=retain, unit=unit)


def media_tokens(media: Iterable[MediaItem]) -> dict[int, int]:
    """Return position → what stands there instead of a token: the rows of images, say."""
    tokens = {}
    for item in media:
        if item.num_cross_rows:
            continue
        positions = [start + number for start, count in item.places for number in range(count)]
        for row, position in enumerate(positions):
            tokens[position] = zlib.crc32(f"{item.digest} {row}".encode())
    return tokens


def cross_rows(media: Iterable[MediaItem]) -> list[int]:
    """Return the rows of the encoder's output."""
    return [
        zlib.crc32(f"{item.digest} {row}".encode())
        for item in media
        for row in range(item.num_cross_rows)
    ]


class FakeModel:
    """retains: the rule of each KV group, in order. weights: every stored value depends on them."""

    def __init__(self, retains: Sequence[Retain], vocab_size: int = 64) -> None:
        self.retains = tuple(retains)
        self.vocab_size = vocab_size
        self.weights = 0

    # --- what is stored ---------------------------------------------------------------------------

    def value(self, token: int, position: int, lora_id: int = 0) -> int:
        """Return the stored value of a text token."""
        return zlib.crc32(struct.pack("<qqq", token, position, lora_id), self.weights)

    def fold(self, state: int, value: int) -> int:
        """Return a state group's state after one more position. The empty state is 0."""
        return zlib.crc32(struct.pack("<q", value), state)

    # --- what a token sees ------------------------------------------------------------------------

    def seen(self, retain: Retain, position: int) -> np.ndarray:
        """Return the positions in this group whose stored values determine the token after
        `position`."""
        match retain:
            case Window(tokens, sinks):
                start = max(0, position - tokens + 1)
                return np.concatenate(
                    [np.arange(min(sinks, start)), np.arange(start, position + 1)]
                )
            case Chunk(tokens):
                return np.arange(position // tokens * tokens, position + 1)
            case _:
                return np.arange(position + 1)

    def choose(
        self,
        views: Sequence[Sequence[int] | np.ndarray],
        position: int,
        seed: int | None,
        allowed: Sequence[int] | None,
    ) -> int:
        """Return the token after `position`. views: for each group the values that it sees (in a
        state group one value, the state). allowed: ids that a token mask allows, None = all."""
        mixed = zlib.crc32(struct.pack("<qq", position, -1 if seed is None else seed))
        for view in views:
            mixed = zlib.crc32(np.asarray(view, np.int64).tobytes(), mixed)
        if allowed is None:
            return mixed % self.vocab_size
        return allowed[mixed % len(allowed)]

    # --- the answer of a correct engine -----------------------------------------------------------

    def next_token(
        self,
        token_ids: Sequence[int],
        *,
        seed: int | None = None,
        lora_id: int = 0,
        allowed: Sequence[int] | None = None,
        rows: Sequence[int] = (),
    ) -> int:
        """Return the tokens that follow `token_ids`, computed without a KV cache. rows: of the
        encoder's output."""
        position = len(token_ids) - 1
        values = np.array(
            [self.value(token, p, lora_id) for p, token in enumerate(token_ids)], np.int64
        )
        views: list[Sequence[int] | np.ndarray] = []
        for retain in self.retains:
            if isinstance(retain, State):
                state = 0
                for value in values.tolist():
                    state = self.fold(state, value)
                views.append([state])
            elif isinstance(retain, Encoder):
                views.append(rows)
            else:
                views.append(values[self.seen(retain, position)])
        return self.choose(views, position, seed, allowed)
