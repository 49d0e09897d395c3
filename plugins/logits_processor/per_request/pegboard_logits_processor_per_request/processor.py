"""Calls a function for each row whose request wants it. The functions have the form of vLLM's
request-level logits processors: (output ids, logits) or (prompt ids, output ids, logits) →
logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

import numpy as np
from torch import Tensor

from pegboard.errors import ConfigError
from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessorSetup
from pegboard_logits_processor_per_request.options import PerRequestOptions


@dataclass
class Changed:
    """A row whose logits change. takes_prompt: the function has three arguments."""

    change: Callable[..., Any]
    takes_prompt: bool
    prompt: list[int]
    outputs: list[int]


class PerRequestProcessor:
    """Implements `pegboard.interfaces.logits_processor.LogitsProcessor`. Raises ConfigError if
    there is no such function."""

    argmax_invariant = False
    host_tokens = True

    def __init__(self, options: PerRequestOptions, setup: LogitsProcessorSetup) -> None:
        self._name = options.make
        self._make = _function(options.make)
        self._rows: dict[int, Changed] = {}

    def update(self, added: Sequence[AddedRow], removed: np.ndarray) -> None:
        """See `LogitsProcessor.update`."""
        for row in removed.tolist():
            self._rows.pop(row, None)
        for row, params, prompt, outputs in added:
            change = self._make(params)
            if change is not None:
                self._rows[row] = Changed(
                    change, self._takes_prompt(change), prompt.tolist(), outputs.tolist()
                )

    def _takes_prompt(self, change: Any) -> bool:
        kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        if not callable(change):
            raise TypeError(f"{self._name} returned {change!r}, expected a function or None")
        count = sum(
            each.kind in kinds and each.default is Parameter.empty
            for each in signature(change).parameters.values()
        )
        if count not in (2, 3):
            raise TypeError(
                f"{self._name} returned a function with {count} arguments, expected (output_ids, "
                "logits) or 3 with prompt_ids"
            )
        return count == 3

    def apply(
        self, logits: Tensor, rows: Tensor, depth: Tensor, drafts: Callable[[], list[list[int]]]
    ) -> Tensor:
        """See `LogitsProcessor.apply`."""
        wanted = [
            (place, self._rows[row]) for place, row in enumerate(rows.tolist()) if row in self._rows
        ]
        before = drafts() if wanted else []
        for place, state in wanted:
            outputs = state.outputs + before[place]
            given = (list(state.prompt), outputs) if state.takes_prompt else (outputs,)
            changed = state.change(*given, logits[place])
            if not isinstance(changed, Tensor) or changed.shape != logits[place].shape:
                shape = (
                    f"shape {tuple(changed.shape)}"
                    if isinstance(changed, Tensor)
                    else f"a {type(changed).__name__}"
                )
                raise TypeError(
                    f"the function of {self._name} returned {shape}, expected logits of shape "
                    f"{tuple(logits[place].shape)}"
                )
            logits[place] = changed
        return logits

    def extend(self, rows: np.ndarray, token_ids: Sequence[Sequence[int]]) -> None:
        """See `LogitsProcessor.extend`."""
        for row, tokens in zip(rows.tolist(), token_ids, strict=True):
            if row in self._rows:
                self._rows[row].outputs += tokens


def _function(path: str) -> Callable[[Any], Any]:
    module, _, name = path.partition(":")
    try:
        target: Any = import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"logits_processor.per_request.make: {path!r} cannot be imported: {error}"
        ) from error
    if not callable(target):
        raise ConfigError(
            f"logits_processor.per_request.make: {path!r} is {target!r}, expected a function"
        )
    function: Callable[[Any], Any] = target
    return function
