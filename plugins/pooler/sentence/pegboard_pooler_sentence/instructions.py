"""Vectors of prompts that begin with an instruction, as GritLM (Muennighoff et al. 2024) has it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.pooler import PoolerSetup, PoolStep
from pegboard_pooler_sentence.reduce import each_row, stacked

USER = b"<|user|>\n"
MARK = b"<|embed|>\n"


class AfterInstruction:
    """The mean of the states after a prompt's instruction, in float32. It is a `Reduction`, and the
    prompts must be computed in one step. A prompt without tokens there becomes zeros. Raises
    ModelError if there is no tokenizer, or one without a token that begins texts."""

    def __init__(self, setup: PoolerSetup) -> None:
        if setup.vocabulary is None:
            raise ModelError(
                "instructions are found by their text, which needs a tokenizer, and there is none; "
                'set pooler_config to {"pooling_type": "LAST"} or another one'
            )
        vocabulary = setup.vocabulary()
        if vocabulary.bos_token_id is None:
            raise ModelError(
                "instructions come after the token that begins a text, and the tokenizer has none; "
                "set bos_token in its config"
            )
        self._token_bytes = vocabulary.token_bytes
        self._first = vocabulary.bos_token_id

    def reduce(self, hidden: Tensor, step: PoolStep) -> Tensor:
        """See `Reduction.reduce`."""
        states = []
        for (_, _, start, ends), stop in zip(each_row(step), step.starts[1:].tolist(), strict=True):
            if not ends:
                continue
            begin = start + self.instruction_length(step.token_ids[start:stop])
            number = max(stop - begin, 1)
            # places known on the host: the host does not wait for the device
            states.append((hidden[begin:stop].sum(0, dtype=torch.float32) / number).to(hidden))
        return stacked(states, hidden)

    def instruction_length(self, token_ids: np.ndarray) -> int:
        """Return how many of a prompt's tokens [n] are not part of what the vector is of. Without
        the token that begins a text, this is 0; without a mark, it is only this token."""
        if not len(token_ids) or token_ids[0] != self._first:
            return 0
        known = len(self._token_bytes)
        pieces = [self._token_bytes[i] if i < known else b"" for i in token_ids[1:].tolist()]
        text = b"".join(pieces)
        # some tokenizers put a space before a text
        mark = b"\n" + MARK if text.removeprefix(b" ").startswith(USER) else MARK
        place = text.find(mark)
        if place < 0:
            return 1
        ends = np.cumsum([len(piece) for piece in pieces])
        return 2 + int(np.searchsorted(ends, place + len(mark)))

    def remove(self, row: int) -> None:
        """See `Reduction.remove`. Nothing is kept."""
