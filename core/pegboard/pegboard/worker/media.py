"""Embeddings that do not come from the vocabulary: encoded media and prompts given as embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pegboard.data.batch import Batch, NewRequest
from pegboard.data.request import Blob, MediaRef
from pegboard.interfaces.encoder_connector import EncoderConnectorWorker
from pegboard.worker.step_inputs import StepInputs


def tensor_of(blob: Blob) -> Tensor:
    """The blob's tensor (a copy)."""
    return torch.frombuffer(bytearray(blob.data), dtype=getattr(torch, blob.dtype)).view(blob.shape)


class EmbeddingSources:
    """Per row: prompt embeddings [n, hidden] and media items; per media hash: the encoded item [num_tokens, hidden].

    encode: the model's own, None for a text model. connector: shares encoded items with other engines.
    """

    def __init__(
        self, encode: Callable[[Sequence[Tensor]], list[Tensor]] | None, connector: EncoderConnectorWorker | None = None
    ) -> None:
        self.encode, self.connector = encode, connector
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

    def run_encoder(self, batch: Batch) -> None:
        """Drop what the batch frees, then encode (or load) what it says."""
        for media_hash in batch.free_media:
            self.encoded.pop(media_hash, None)
        if batch.encode is None or not len(batch.encode):
            return
        wanted = [self.media[row][index] for row, index in batch.encode.tolist()]
        items = {item.hash: item for item in wanted if item.hash not in self.encoded}
        found = {name: self.connector.load(name) for name in items} if self.connector is not None else {}
        missing = [item for name, item in items.items() if found.get(name) is None]
        if missing:
            assert self.encode is not None, "only a model that encodes media is given media"
            made = self.encode([tensor_of(item.data) for item in missing if item.data is not None])
            for item, encoded in zip(missing, made, strict=True):
                found[item.hash] = encoded
                if self.connector is not None:
                    self.connector.save(item.hash, encoded)
        self.encoded.update({name: tensor for name, tensor in found.items() if tensor is not None})

    @property
    def in_use(self) -> bool:
        """Some row's embeddings do not all come from its token ids."""
        return bool(self.prompts or self.media)

    def merge(self, hidden: Tensor, batch: Batch, inputs: StepInputs) -> Tensor:
        """Overwrite the embeddings of positions that have a source of their own; hidden [T, size] is changed in place."""
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
