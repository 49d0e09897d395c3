"""How rows get from one pipeline stage to the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pegboard.interfaces.collective import Collective
from pegboard.worker.step_inputs import InputBuilder, StepInputs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BEFORE = 0
"""The place of the stage that sends, in the group of two stages."""


class Receive:
    """The `Entrance` of later stages: what the stage before sends. Its first message is the form of
    the rows."""

    def __init__(self, collective: Collective, inputs: InputBuilder) -> None:
        self._collective = collective
        self._inputs = inputs
        self._buffer: Tensor | None = None
        self.tensors: Sequence[Tensor] = ()

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
