"""Sets the logits of the banned tokens to −inf, for all rows at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pegboard.errors import ConfigError
from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessorSetup
from pegboard_logits_processor_ban.options import BanOptions


class BanProcessor:
    """Implements `pegboard.interfaces.logits_processor.LogitsProcessor`. Raises ConfigError if an
    id is outside the vocabulary, if no token contains a text, or if nothing would be left."""

    argmax_invariant = False
    host_tokens = False

    def __init__(self, options: BanOptions, setup: LogitsProcessorSetup) -> None:
        banned = set(options.token_ids)
        size = setup.limits.vocab_size
        if outside := [token for token in options.token_ids if token >= size]:
            raise ConfigError(
                f"logits processor ban: token_ids has {outside[0]}, and the model has {size} tokens"
            )
        for text in options.texts:
            part = text.encode()
            ids = {
                token
                for token, token_text in enumerate(setup.vocabulary().token_bytes)
                if part in token_text
            }
            if not ids:
                raise ConfigError(
                    f"logits processor ban: no token contains {text!r}; a token is shorter than "
                    "most words"
                )
            banned |= ids
        if len(banned) == size:
            raise ConfigError("logits processor ban: every token is banned")
        self._banned = torch.tensor(sorted(banned), dtype=torch.int64, device=setup.device)

    def update(self, added: Sequence[AddedRow], removed: np.ndarray) -> None:
        """Do nothing: all rows are treated alike."""

    def apply(
        self, logits: Tensor, rows: Tensor, depth: Tensor, drafts: Callable[[], list[list[int]]]
    ) -> Tensor:
        """See `LogitsProcessor.apply`."""
        return logits.index_fill_(1, self._banned, -torch.inf)

    def extend(self, rows: np.ndarray, token_ids: Sequence[Sequence[int]]) -> None:
        """Do nothing: new tokens change nothing."""
