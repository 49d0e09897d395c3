"""The prompts that were given as embeddings, by row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pegboard.data.batch import Batch, NewRequest
from pegboard.worker.step_inputs import StepInputs


class PromptRows:
    """given: row → its prompt [tokens, width]."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.given: dict[int, Tensor] = {}

    def add(self, new: NewRequest) -> None:
        """Keep the prompt of a new row, which is given as embeddings."""
        embeds = new.prompt_embeds
        assert embeds is not None
        flat = torch.frombuffer(bytearray(embeds.data), dtype=getattr(torch, embeds.dtype))
        self.given[new.row] = flat.view(embeds.shape).to(self.device)

    def remove(self, rows: np.ndarray) -> None:
        """Free these rows."""
        for row in rows.tolist():
            self.given.pop(row, None)

    def computes(self, batch: Batch) -> bool:
        """Return whether the step computes a position whose embedding was given."""
        starts = batch.num_computed_tokens.tolist()
        return any(
            row in self.given and start < len(self.given[row])
            for row, start in zip(batch.rows.tolist(), starts, strict=True)
        )

    def collect(self, batch: Batch, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Return the places [G] of such positions in the step, and their rows [G, width] in
        float32."""
        places = []
        values = []
        for index, row in enumerate(batch.rows.tolist()):
            if row in self.given:
                start = int(inputs.starts[index])
                first = int(inputs.query_start_loc[index])
                part = self.given[row][start : start + int(batch.num_scheduled_tokens[index])]
                places.append(torch.arange(first, first + len(part)))
                values.append(part.float())
        return torch.cat(places).to(self.device), torch.cat(values)
