"""The classes from which vLLM's logits processors derive (`vllm.v1.sample.logits_processor`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from inspect import signature
from typing import Any

RequestLogitsProcessor = Callable[..., Any]
"""(output ids, logits [V]) or (prompt ids, output ids, logits [V]) → logits [V]."""
AddedRequest = tuple[int, Any, list[int] | None, list[int]]
"""The index in the batch, the SamplingParams, the prompt, and the output, a list that grows."""


class MoveDirectionality(Enum):
    """Whether a request takes the place of another, or both change places."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """What has changed in the batch since the last step, to be read in the order removed, added,
    moved. batch_size: the number of requests. The index of a request is less."""

    batch_size: int
    removed: Sequence[int]
    added: Sequence[AddedRequest]
    moved: Sequence[tuple[int, int, MoveDirectionality]] = ()


class LogitsProcessor(ABC):
    """Changes the logits of a whole batch."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError if the parameters of a request are wrong."""

    @abstractmethod
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None: ...

    @abstractmethod
    def apply(self, logits: Any) -> Any:
        """Return the changed logits [batch_size, V]."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Return True if the most likely token never changes."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each `apply`. None: nothing has changed."""


def process_dict_updates(
    req_entries: dict[int, Any], batch_update: BatchUpdate | None, new_state: Callable[..., Any]
) -> bool:
    """Keep a mapping from index to state up to date, and return whether it has changed. new_state:
    makes the state of a request from its parameters, prompt and output, or None."""
    if batch_update is None:
        return False
    before = dict(req_entries)
    for index in batch_update.removed:
        req_entries.pop(index, None)
    for index, params, prompt, output in batch_update.added:
        state = new_state(params, prompt, output)
        if state is None:
            req_entries.pop(index, None)
        else:
            req_entries[index] = state
    for source, target, direction in batch_update.moved:
        state = req_entries.pop(source, None)
        other = req_entries.pop(target, None)
        if state is not None:
            req_entries[target] = state
        if other is not None and direction is MoveDirectionality.SWAP:
            req_entries[source] = other
    return req_entries != before


class AdapterLogitsProcessor(LogitsProcessor):
    """Calls a function for each request that wants one."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[Any], Any]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: Any) -> RequestLogitsProcessor | None:
        """Return the function of a request, or None."""

    def _new_state(
        self, params: Any, prompt: list[int] | None, output: list[int]
    ) -> Callable[[Any], Any] | None:
        function = self.new_req_logits_processor(params)
        if function is None:
            return None
        takes_prompt = len(signature(function).parameters) == 3
        tokens = ([] if prompt is None else prompt, output) if takes_prompt else (output,)
        return lambda logits: function(*tokens, logits)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """See `LogitsProcessor.update_state`."""
        process_dict_updates(self.req_info, batch_update, self._new_state)

    def apply(self, logits: Any) -> Any:
        """See `LogitsProcessor.apply`."""
        for index, function in self.req_info.items():
            logits[index] = function(logits[index])
        return logits
