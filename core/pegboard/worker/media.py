"""Embeddings that do not come from the vocabulary: encoded media and prompts given as embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.batch import Batch, Blob, MediaRef, NewRequest
from pegboard.worker.step_inputs import StepInputs


def tensor_of(blob: Blob) -> Tensor:
    """The blob's tensor (a copy)."""
    return torch.frombuffer(bytearray(blob.data), dtype=getattr(torch, blob.dtype)).view(blob.shape)


class EmbeddingSources:
    """Per row: prompt embeddings [n, hidden] and media items; per media hash: the encoded item [num_tokens, hidden]."""

    def __init__(self, encode: Callable[[Sequence[Tensor]], list[Tensor]] | None) -> None:
        self.encode = encode
        self.prompts: dict[int, Tensor] = {}
        self.media: dict[int, tuple[MediaRef, ...]] = {}
        self.encoded: dict[str, Tensor] = {}

    def add(self, new: NewRequest) -> None:
        self.remove(new.row)
        if new.prompt_embeds is not None:
            self.prompts[new.row] = tensor_of(new.prompt_embeds)
        if new.media:
            self.media[new.row] = new.media

    def remove(self, row: int) -> None:
        self.prompts.pop(row, None)
        self.media.pop(row, None)

    def run_encoder(self, batch: Batch) -> tuple[str, ...]:
        """Encode what the batch says and drop what it frees; returns the hashes that are new."""
        for media_hash in batch.free_media:
            self.encoded.pop(media_hash, None)
        if batch.encode is None or not len(batch.encode):
            return ()
        items = [self.media[row][index] for row, index in batch.encode.tolist()]
        assert self.encode is not None, "only a model that encodes media is given media"
        blobs: list[Any] = [tensor_of(item.data) for item in items if item.data is not None]
        for item, encoded in zip(items, self.encode(blobs), strict=True):
            self.encoded[item.hash] = encoded
        return tuple(item.hash for item in items)

    def merge(self, hidden: Tensor, batch: Batch, inputs: StepInputs) -> Tensor:
        """Overwrite the embeddings of positions that have a source of their own; hidden [T, size] is changed in place."""
        if not self.prompts and not self.media:
            return hidden
        for index, row in enumerate(batch.rows.tolist()):
            start, first = int(inputs.starts[index]), int(inputs.query_start_loc[index])
            count = int(batch.num_scheduled_tokens[index])
            if row in self.prompts:
                _overlay(hidden, self.prompts[row], 0, start, first, count)
            for item in self.media.get(row, ()):
                if item.hash in self.encoded:
                    _overlay(hidden, self.encoded[item.hash], item.offset, start, first, count)
        return hidden


def _overlay(hidden: Tensor, source: Tensor, offset: int, start: int, first: int, count: int) -> None:
    """Write the part of `source` (at prompt position `offset`) that falls into positions start … start + count − 1."""
    low, high = max(offset, start), min(offset + len(source), start + count)
    if low < high:
        hidden[first + low - start : first + high - start] = source[low - offset : high - offset].to(hidden.dtype)
