"""A plugin in one file: a request with vllm_xargs={"target_token": 9} gets nothing but token 9.

pegboard serve --plugin examples/target_token.py --logits-processors target_token
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pegboard.data.sampling_params import SamplingParams
from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessorSetup


class TargetToken:
    plugin = "logits_processor:target_token"
    spec_fields: ClassVar[dict[str, Any]] = {
        "arguments": ("target_token",),
        "validate": f"{__name__}:validate",
    }
    argmax_invariant = False

    def __init__(self, options: None, setup: LogitsProcessorSetup) -> None:
        self.vocab_size = setup.limits.vocab_size
        self.targets: dict[int, int] = {}  # by row

    def update(self, added: Sequence[AddedRow], removed: np.ndarray) -> None:
        for row in removed.tolist():
            self.targets.pop(row, None)
        for each in added:
            target = (each.params.extra_args or {}).get("target_token")
            if target is not None:
                self.targets[each.row] = min(target, self.vocab_size - 1)

    def apply(
        self, logits: Tensor, rows: Tensor, depth: Tensor, drafts: Callable[[], list[list[int]]]
    ) -> Tensor:
        for place, row in enumerate(rows.tolist()):
            if row in self.targets:
                logits[place] = -torch.inf
                logits[place, self.targets[row]] = 0.0
        return logits


def validate(params: SamplingParams) -> str | None:
    target = (params.extra_args or {}).get("target_token")
    is_right = target is None or (type(target) is int and target >= 0)
    return None if is_right else f"target_token must be a token id, got {target!r}"
