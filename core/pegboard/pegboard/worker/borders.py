"""Where rows enter and leave a pipeline stage: the first one embeds token ids, and each of them
sends what it has computed to the next one."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from pegboard.errors import expect
from pegboard.interfaces.collective import Collective
from pegboard.worker.step_inputs import InputBuilder, StepInputs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BEFORE = 0
"""The place of the stage that sends, in the group of two stages."""


class Entrance(Protocol):
    """Where the rows of a step come from."""

    def one(self) -> Tensor:
        """Return one row [1, width], which says the width and the dtype of all of them."""

    def rows(self, inputs: StepInputs) -> Tensor:
        """Return the rows of a step [T, width], which are valid until the next step."""


class Embed:
    """Embeds the ids of the tokens."""

    def __init__(self, model: Any, inputs: InputBuilder) -> None:
        self._model = model
        self._inputs = inputs

    def one(self) -> Tensor:
        embedded = self._model.embed(*(each.on_device[:1] for each in self._inputs.to_embed))
        return expect(embedded, Tensor, self._model, "embed")

    def rows(self, inputs: StepInputs) -> Tensor:
        rows: Tensor = self._model.embed(*inputs.to_embed)
        return rows


class Receive:
    """Receives what the stage before this one sends. Its first message is the form of the rows."""

    def __init__(self, collective: Collective, inputs: InputBuilder) -> None:
        self._collective = collective
        self._inputs = inputs
        self._buffer: Tensor | None = None

    def one(self) -> Tensor:
        assert self._buffer is not None, "a first step has been received"
        return self._buffer[:1]

    def rows(self, inputs: StepInputs) -> Tensor:
        if self._buffer is None:
            self._buffer = self._received_form()
        return self._collective.broadcast(self._buffer[: inputs.num_tokens], BEFORE)

    def _received_form(self) -> Tensor:
        form = torch.zeros(1, 2, dtype=torch.int64, device=self._inputs.device)
        width, dtype = self._collective.broadcast(form, BEFORE)[0].tolist()
        return form.new_zeros(self._inputs.max_tokens, width, dtype=DTYPES[dtype])


class Sender:
    """Sends rows to the next stage, which receives them with `Receive`."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._is_first = True

    def send(self, rows: Tensor) -> None:
        """rows: [T, width]."""
        if self._is_first:
            form = [[rows.shape[1], DTYPES.index(rows.dtype)]]
            self._collective.broadcast(torch.tensor(form, device=rows.device), BEFORE)
            self._is_first = False
        self._collective.broadcast(rows, BEFORE)
