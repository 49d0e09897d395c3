"""Kind `io_processor` (provisional): makes prompts of any data, and any data of what a model that
pools makes of them. The setting `io_processor_plugin` names one. Runs in A."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    from pegboard.data.output import RequestOutput
    from pegboard.data.pooling_params import PoolingParams
    from pegboard.interfaces.api import Prompt
    from pegboard.interfaces.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class IOProcessorSpec(Spec):
    """Entry-point name: what `io_processor_plugin` calls it. IO processors declare only what every
    spec declares."""


@dataclass(frozen=True, slots=True)
class IOProcessorSetup:
    """model: as the user names it. labels: the names of its classes. tokenizer: raises RequestError
    if `skip_tokenizer_init` is set."""

    model: str
    labels: tuple[str, ...]
    tokenizer: "Callable[[], Tokenizer]"


class IOProcessor(Protocol):
    """Its methods are called in threads, for several requests at once."""

    def prompts(self, data: Any) -> "Sequence[tuple[Prompt, PoolingParams]]":
        """Return the prompts that the data of a request asks for, at least one, and what the model
        shall make of each. data: what a client sent as JSON, or a user gave to `LLM.encode`. Raises
        RequestError, whose parameter is "data", for data that is wrong."""

    def answer(self, data: Any, outputs: "Sequence[RequestOutput]") -> Any:
        """Return what the outputs of these prompts, in their order, mean: JSON values. data: of the
        request. `RequestOutput.pooled` returns the array of an output."""
