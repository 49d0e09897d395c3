"""AsyncLLM with vLLM's constructors and `encode`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pegboard
from pegboard import PoolingParams, PoolingRequestOutput
from pegboard_vllm_compat.engine_args import of_args, settings_of
from pegboard_vllm_compat.offline import PoolingOutput
from pegboard_vllm_compat.processors import adapted_loggers, with_processors


class AsyncLLM(pegboard.AsyncLLM):
    """`pegboard.AsyncLLM`, which also takes every field of EngineArgs."""

    _measures = False

    def __init__(
        self,
        model: str | None = None,
        *,
        stat_loggers: Sequence[Any] | None = None,
        **settings: Any,
    ) -> None:
        loggers = adapted_loggers(stat_loggers, model=model or "")
        plain = with_processors(settings_of(settings), model, elsewhere=True, loggers=loggers)
        self._measures = bool(loggers)
        super().__init__(model, **plain)

    def _open(self, settings: Any, engine: Any, metrics: Any) -> None:
        # sinks run in this process only if there are metrics, even if it has none of its own
        super()._open(settings, engine, () if self._measures else metrics)

    @classmethod
    def from_engine_args(
        cls, args: Any, *, stat_loggers: Sequence[Any] | None = None, **more: Any
    ) -> "AsyncLLM":
        """Return an engine in a process of its own, with the settings of an AsyncEngineArgs.
        stat_loggers: classes or functions that make stat loggers of vLLM's form."""
        return cls(**of_args(args), stat_loggers=stat_loggers)

    async def encode(
        self, prompt: Any, pooling_params: PoolingParams, request_id: str, **more: Any
    ) -> AsyncIterator[PoolingRequestOutput[Any]]:
        """Yield the numbers that the model makes of a prompt."""
        async for output in super().encode(prompt, pooling_params, request_id, **more):
            output.outputs = PoolingOutput(output.outputs.data)
            yield output
