"""The steps of a rank that has some of the experts of other engines: it takes part in every step of
theirs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pegboard.data.batch import Batch, StepOutput
from pegboard.layers.engine_rows import EngineRows
from pegboard.worker.endings import Masks
from pegboard.worker.model_runner import ModelRunner
from pegboard.worker.runner_parts import RunnerParts
from pegboard.worker.step_inputs import NOT_PADDED, InputBuilder, StepInputs

AT_START = (False, False, 0)
"""Said in the first steps, which all engines take alike."""


def filler(inputs: InputBuilder) -> StepInputs:
    """Return a step of one token that belongs to no request, in block 0, which belongs to none
    either."""
    if inputs.copies is not None:
        inputs.take_turns(inputs.copies)
    for buffer in (*inputs.to_embed, *inputs.to_place):
        buffer.array[0] = 0
    inputs.query_start_loc.array[:2] = inputs.one_each[:2]
    inputs.seq_lens.array[0] = 1
    for slots, table in zip(inputs.slots, inputs.tables, strict=True):
        slots.array[0] = 0
        table.array[0] = 0
    return inputs.send(1, 1, NOT_PADDED)


class LockstepRunner(ModelRunner):
    """rows: of all engines."""

    def __init__(self, parts: RunnerParts, rows: EngineRows) -> None:
        super().__init__(parts)
        self.rows = rows

    @torch.inference_mode()
    def run(self, batch: Batch, masks: Masks | None = None) -> Callable[[], StepOutput]:
        """Compute `batch` after an exchange with the other engines. For a batch
        without rows, one token of no request is computed, if another engine has rows."""
        is_quiet, is_over = self.rows.agree(batch.num_tokens, batch.wave or AT_START)
        if not batch.num_rows and self.rows.size:
            inputs = filler(self.inputs)
            self.parts.loaded.plan(inputs)
            self.stages.forward(None, inputs)
        finish = super().run(batch, masks)

        def wait() -> StepOutput:
            output = finish()
            output.is_quiet = is_quiet
            output.is_over = is_over
            return output

        return wait


def make_runner(parts: RunnerParts) -> ModelRunner:
    rows = parts.loaded.setup.ranks.engines
    return ModelRunner(parts) if rows is None else LockstepRunner(parts, rows)
