"""IO processors in vLLM's form as plugins of the kind `io_processor`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar

from pegboard import PoolingParams, PoolingRequestOutput
from pegboard.data.output import RequestOutput
from pegboard.errors import RequestError
from pegboard.interfaces.api import Prompt
from pegboard.interfaces.io_processor import IOProcessorSetup
from pegboard_vllm_compat import finder
from pegboard_vllm_compat.io_interface import IOProcessorRequest, make_io_processor, params_of
from pegboard_vllm_compat.offline import PoolingOutput

FORMS = (
    'expected of the IO processor: texts, {"prompt": text} or {"prompt_token_ids": [ids]}; the '
    "server takes no other prompts from it"
)


class VllmIOProcessor:
    """Implements `pegboard.interfaces.io_processor.IOProcessor`. target: the name of vLLM's IO
    processor. Its asynchronous methods run in an event loop of their own."""

    target: ClassVar[str]
    base_model: ClassVar[str] = ""
    shadow: ClassVar[bool] = False

    def __init__(self, options: None, setup: IOProcessorSetup) -> None:
        finder.install(shadow=self.shadow)
        self._processor = make_io_processor(self.target, self.base_model or setup.model, None)

    def prompts(self, data: Any) -> list[tuple[Prompt, PoolingParams]]:
        """See `IOProcessor.prompts`."""
        processor = self._processor
        try:
            given = processor.parse_request(IOProcessorRequest(data=data))
            inputs = asyncio.run(processor.pre_process_async(given))
            params = params_of(processor, None)
        except (ValueError, TypeError, KeyError) as error:
            raise RequestError(f"data: {error}", parameter="data") from error
        several = inputs if isinstance(inputs, list) else [inputs]
        each = params if isinstance(params, list) else [params] * len(several)
        return [(_prompt(one), chosen) for one, chosen in zip(several, each, strict=True)]

    def answer(self, data: Any, outputs: Sequence[RequestOutput]) -> Any:
        """See `IOProcessor.answer`."""

        async def numbered() -> AsyncGenerator[tuple[int, Any], None]:
            for number, output in enumerate(outputs):
                ids = list(output.prompt_token_ids or ())
                pooled = PoolingOutput(output.pooled())
                cached = output.num_cached_tokens
                yield number, PoolingRequestOutput(output.request_id, pooled, ids, cached)

        result = asyncio.run(self._processor.post_process_async(numbered()))
        return self._processor.output_to_response(result).model_dump(mode="json")["data"]


def _prompt(value: Any) -> Prompt:
    """Return a prompt in vLLM's form as Pegboard's. Raises RequestError for other forms."""
    if isinstance(value, str):
        return Prompt(text=value)
    if isinstance(value, dict) and value.keys() == {"prompt"}:
        return Prompt(text=value["prompt"])
    if isinstance(value, dict) and value.keys() == {"prompt_token_ids"}:
        return Prompt(token_ids=value["prompt_token_ids"])
    shown = sorted(value) if isinstance(value, dict) else type(value).__name__
    raise RequestError(f"{FORMS}; got {shown}", parameter="data")
