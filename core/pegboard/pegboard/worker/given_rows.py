"""Prompt embeddings given by users, kept by the row of their request."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pegboard.data.batch import Batch, NewRequest
from pegboard.worker.step_inputs import StepInputs


class GivenRows:
    """spans: row → [(position of the first one in the prompt, rows [tokens, width]), …]."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.spans: dict[int, list[tuple[int, Tensor]]] = {}

    def add(self, new: NewRequest) -> None:
        """Keep the embeddings in the prompt of a new request."""
        self.spans[new.row] = []
        for embeds in new.prompt_embeds:
            flat = torch.frombuffer(bytearray(embeds.data), dtype=getattr(torch, embeds.dtype))
            rows = flat.view(embeds.shape).to(self.device)
            self.spans[new.row].append((embeds.start, rows))

    def remove(self, rows: np.ndarray) -> None:
        """Free these rows."""
        for row in rows.tolist():
            self.spans.pop(row, None)

    def computed(self, batch: Batch) -> bool:
        """Return whether the step computes a position whose embedding was given."""
        counts = batch.num_scheduled_tokens.tolist()
        starts = batch.num_computed_tokens.tolist()
        return any(
            start < first + len(rows) and first < start + count
            for row, start, count in zip(batch.rows.tolist(), starts, counts, strict=True)
            for first, rows in self.spans.get(row, ())
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
            for first, rows in self.spans.get(row, ()):
                part = rows[max(start - first, 0) : max(stop - first, 0)]
                begin = place + max(start, first)
                places.append(torch.arange(begin, begin + len(part)))
                values.append(part.float())
        return torch.cat(places).to(self.device), torch.cat(values)
