"""The class from which vLLM's IO processors derive (`vllm.plugins.io_processors.interface`), and
which one an engine has."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from pydantic import Field

from pegboard import PoolingParams, SamplingParams
from pegboard.errors import ConfigError
from pegboard_vllm_compat.entry_points import io_processors
from pegboard_vllm_compat.protocol import RequestFields

Input = TypeVar("Input")
Output = TypeVar("Output")
Data = TypeVar("Data")


class IOProcessorRequest(RequestFields, Generic[Data]):
    """A request for an IO processor."""

    model: str | None = None
    task: str = "plugin"
    priority: int = 0
    data: Data


class IOProcessorResponse(RequestFields, Generic[Data]):
    """The answer of an IO processor."""

    request_id: str | None = None
    created_at: int = Field(default_factory=lambda: int(time.time()))
    data: Data


class IOProcessor(ABC, Generic[Input, Output]):
    """Makes prompts of any data, and any data of what a pooling model says about them. A subclass
    has `parse_request`, or `parse_data` of newer versions of vLLM."""

    def __init__(self, vllm_config: Any, renderer: Any = None) -> None:
        self.vllm_config = vllm_config

    def parse_request(self, request: Any) -> Any:
        """Return the input that a request describes. request: the mapping with the key "data"."""
        data = request["data"] if isinstance(request, dict) else request.data
        return self.parse_data(data)

    def parse_data(self, data: object) -> Any:
        """Return the input that the data of a request describes."""
        raise TypeError(f"{type(self).__name__} has no parse_request")

    def validate_or_generate_params(
        self, params: SamplingParams | PoolingParams | None = None
    ) -> SamplingParams | PoolingParams:
        """Return the parameters of the prompts."""
        return PoolingParams() if params is None else params

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        """Return the parameters of the prompts, in newer versions of vLLM."""
        return PoolingParams() if params is None else params

    @abstractmethod
    def pre_process(self, prompt: Any, request_id: str | None = None, **kwargs: Any) -> Any:
        """Return the prompt or prompts of an input."""

    async def pre_process_async(
        self, prompt: Any, request_id: str | None = None, **kwargs: Any
    ) -> Any:
        """Return the prompt or prompts of an input."""
        return self.pre_process(prompt, request_id, **kwargs)

    @abstractmethod
    def post_process(
        self, model_output: Sequence[Any], request_id: str | None = None, **kwargs: Any
    ) -> Any:
        """Return what the outputs of the prompts, in their order, mean."""

    async def post_process_async(
        self,
        model_output: AsyncGenerator[tuple[int, Any], None],
        request_id: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return what the outputs of the prompts mean. model_output: with their places."""
        outputs = [pair async for pair in model_output]
        outputs.sort(key=lambda pair: pair[0])
        return self.post_process([output for _, output in outputs], request_id, **kwargs)

    def output_to_response(self, plugin_output: Any) -> Any:
        """Return the answer of a server."""
        return IOProcessorResponse(data=plugin_output)


def make_io_processor(name: str, model: str | None, tokenizer: str | None) -> IOProcessor[Any, Any]:
    """Return the installed IO processor of a name. model, tokenizer: as the user named them. Raises
    ConfigError if there is none."""
    points = io_processors()
    if name not in points:
        known = ", ".join(sorted(points)) or "none"
        raise ConfigError(f"io_processor_plugin {name!r} is not installed; installed: {known}")
    path = points[name].load()()
    if path is None:
        raise ConfigError(f"the IO processor {name!r} says that it cannot run here")
    module, _, attribute = path.rpartition(".")
    facts = SimpleNamespace(model=model, tokenizer=tokenizer or model, io_processor_plugin=name)
    config = SimpleNamespace(model_config=facts)
    processor: IOProcessor[Any, Any] = getattr(import_module(module), attribute)(config)
    return processor


def params_of(processor: IOProcessor[Any, Any], params: Any) -> Any:
    """Return the parameters of the prompts. params: those of the caller, or None."""
    is_newer = type(processor).merge_pooling_params is not IOProcessor.merge_pooling_params
    method = processor.merge_pooling_params if is_newer else processor.validate_or_generate_params
    if isinstance(params, Sequence):
        return [method(one) for one in params]
    return method(params)
