"""Logprobs of prompt tokens, which are collected chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pegboard.data.batch import Batch, Logprobs, NewRequest
from pegboard.interfaces.sampler import Sampler
from pegboard.worker.adapter_groups import AdapterGroups
from pegboard.worker.step_inputs import RowState, StepInputs

CHUNK = 256
"""Number of positions that are scored at once. It limits the logits in memory to 256 ×
vocabulary."""


class PromptScores:
    """The rows that asked for prompt logprobs, and the logprobs found so far."""

    def __init__(
        self,
        sampler: Sampler,
        logits: Callable[[Tensor], Tensor],
        state: RowState,
        head_adapters: AdapterGroups,
    ) -> None:
        self.sampler = sampler
        self.logits = logits
        self.state = state
        self.head_adapters = head_adapters
        self.wanted: dict[int, int] = {}
        self.parts: dict[int, list[Logprobs]] = {}

    def add(self, new: NewRequest) -> None:
        """Note the request if its prompt must be scored. That is only so when it starts: a resumed
        request has already delivered its logprobs, and a fork delivers none."""
        self.remove(new.row)
        params = new.params
        is_start = new.num_computed_tokens == 0 and len(new.token_ids) == new.num_prompt_tokens > 1
        if is_start and params.prompt_logprobs is not None:
            self.wanted[new.row] = params.prompt_logprobs
            self.parts[new.row] = []

    def remove(self, row: int) -> None:
        self.wanted.pop(row, None)
        self.parts.pop(row, None)

    def collect(self, batch: Batch, inputs: StepInputs, hidden: Tensor) -> dict[int, Logprobs]:
        """Score this step's prompt positions (hidden [T, size]). Returns the rows whose prompt ends
        in this step, with which the first token is reported. The last position of a prompt is not
        scored, so that step may score nothing."""
        finished: dict[int, Logprobs] = {}
        for index, row in enumerate(batch.rows.tolist()):
            if row not in self.wanted:
                continue
            start = int(inputs.starts[index])
            num_prompt = int(self.state.num_prompt_tokens[row])
            first = int(inputs.query_start_loc[index])
            num_scheduled = int(batch.num_scheduled_tokens[index])
            count = min(num_scheduled, num_prompt - 1 - start)
            for offset in range(0, count, CHUNK):
                stop = min(offset + CHUNK, count)
                targets = self.state.token_ids[row, start + offset + 1 : start + stop + 1]
                slot = 0 if batch.lora_slots is None else int(batch.lora_slots[index])
                with self.head_adapters.only(slot, stop - offset):
                    scores = self.logits(hidden[first + offset : first + stop])
                self.parts[row].append(
                    self.sampler.score(scores, torch.from_numpy(targets).long(), self.wanted[row])
                )
            if start + num_scheduled >= num_prompt:
                finished[row] = Logprobs.concat(self.parts[row])
                self.remove(row)
        return finished
