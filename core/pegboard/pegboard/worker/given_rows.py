"""The rows of prompts that are not embeddings of tokens: embeddings that users give, and those that
the model makes of images, audio and video. They are kept by the row of their request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pegboard.data.batch import Batch, NewRequest
from pegboard.data.media import MediaArray, MediaItem
from pegboard.layers.shards import Group
from pegboard.worker.item_owners import ItemOwners
from pegboard.worker.shared_rows import SharedRows
from pegboard.worker.step_inputs import StepInputs


class Span(NamedTuple):
    """The positions start … stop of a prompt. rows: theirs, [stop - start, width], or the digest of
    the item that they come from, where the first of them is number `first`."""

    start: int
    stop: int
    rows: Tensor | str
    first: int = 0


class GivenRows:
    """model: makes the rows of images, audio and video, if the engine sends any. group: the ranks
    that share out the items. shared: None = other engines make none for this one. encoded: digest →
    rows [n, width]."""

    def __init__(
        self, device: str, model: Any, group: Group, shared: SharedRows | None = None
    ) -> None:
        self.device = device
        self.owners = ItemOwners(group, device)
        self.model = model
        self.shared = shared
        self.spans: dict[int, list[Span]] = {}
        self.encoded: dict[str, Tensor] = {}

    def encode(self, batch: Batch) -> None:
        """Make the rows of the items that the engine sends, and drop those that it names."""
        for digest in batch.forgotten:
            del self.encoded[digest]
        if not (items := batch.encode):
            return
        owners = self.owners.of(items)
        rank = self.owners.group.rank
        share = [item for item, owner in zip(items, owners, strict=True) if owner == rank]
        every = self.owners.exchange(items, owners, self._rows(share))
        for item in items:
            rows, is_new = every[item.digest]
            self.encoded[item.digest] = rows
            if self.shared is not None and is_new:
                self.shared.save(item, rows)

    def _rows(self, items: Iterable[MediaItem]) -> dict[str, tuple[Tensor, bool]]:
        """Return the rows of each item by its digest, and whether they are new: other engines may
        have made them."""
        every = {}
        modalities: dict[str, list[MediaItem]] = {}
        for item in items:
            if self.shared is not None and (rows := self.shared.load(item)) is not None:
                every[item.digest] = rows, False
            else:
                modalities.setdefault(item.modality, []).append(item)
        for modality, missing in modalities.items():
            arrays = [self._tensors(item.arrays) for item in missing]
            for item, rows in zip(missing, self.model.encode(modality, arrays), strict=True):
                if len(rows) != item.num_rows:
                    raise ValueError(
                        f"encode() returned {len(rows)} rows for {item.num_rows} placeholders"
                    )
                every[item.digest] = rows, True
        return every

    def _tensors(self, arrays: Mapping[str, MediaArray]) -> dict[str, Tensor]:
        tensors = {}
        for name, array in arrays.items():
            values = np.frombuffer(array.data, array.dtype).reshape(array.shape)
            tensors[name] = torch.from_numpy(values.copy()).to(self.device)
        return tensors

    def add(self, new: NewRequest) -> None:
        """Keep what is in the prompt of a new request."""
        if spans := [*self._embeddings(new), *_media(new)]:
            self.spans[new.row] = sorted(spans, key=lambda span: span.start)

    def _embeddings(self, new: NewRequest) -> Iterator[Span]:
        for embeds in new.prompt_embeds:
            flat = torch.frombuffer(bytearray(embeds.data), dtype=getattr(torch, embeds.dtype))
            rows = flat.view(embeds.shape).to(self.device)
            yield Span(embeds.start, embeds.stop, rows)

    def remove(self, rows: np.ndarray) -> None:
        """Free these rows."""
        for row in rows.tolist():
            self.spans.pop(row, None)

    def computed(self, batch: Batch) -> bool:
        """Return whether the step computes a position that has such a row."""
        counts = batch.num_scheduled_tokens.tolist()
        starts = batch.num_computed_tokens.tolist()
        return any(
            start < span.stop and span.start < start + count
            for row, start, count in zip(batch.rows.tolist(), starts, counts, strict=True)
            if row in self.spans and start < self.spans[row][-1].stop
            for span in self.spans[row]
        )

    def collect(self, batch: Batch, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Return the places [G] of such positions in the step, and their rows [G, width] in
        float32."""
        places = []
        values = []
        for index, row in enumerate(batch.rows.tolist()):
            start = int(inputs.starts[index])
            place = int(inputs.query_start_loc[index]) - start
            stop = start + int(batch.num_scheduled_tokens[index])
            for span in self.spans.get(row, ()):
                begin = max(start, span.start)
                end = min(stop, span.stop)
                if begin >= end:
                    continue
                places.append(torch.arange(place + begin, place + end))
                source = self.encoded[span.rows] if isinstance(span.rows, str) else span.rows
                moved = span.first - span.start
                values.append(source[begin + moved : end + moved].float())
        return torch.cat(places).to(self.device), torch.cat(values)


def _media(new: NewRequest) -> Iterator[Span]:
    for item in new.media:
        if item.num_cross_rows:
            continue
        first = 0
        for start, count in item.places:
            yield Span(start, start + count, item.digest, first)
            first += count
