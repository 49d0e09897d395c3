"""Pegboard: LLM inference and serving, composed of plugins.

    from pegboard import LLM, SamplingParams

Every name below is imported on first use, so `import pegboard` takes almost no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "LLM": "pegboard.front.llm",
    "AsyncLLM": "pegboard.front.async_llm",
    "LoRARequest": "pegboard.data.request",
    "SamplingParams": "pegboard.data.sampling_params",
    "StructuredOutputsParams": "pegboard.data.sampling_params",
    "RequestOutputKind": "pegboard.data.sampling_params",
    "BeamSearchParams": "pegboard.data.sampling_params",
    "EngineConfig": "pegboard.config.schema",
    "CompletionOutput": "pegboard.data.output",
    "RequestOutput": "pegboard.data.output",
    "Logprob": "pegboard.data.output",
    "PoolingParams": "pegboard.data.pooling_params",
    "EmbeddingOutput": "pegboard.data.output",
    "EmbeddingRequestOutput": "pegboard.data.output",
    "ClassificationOutput": "pegboard.data.output",
    "ClassificationRequestOutput": "pegboard.data.output",
    "ScoringOutput": "pegboard.data.output",
    "ScoringRequestOutput": "pegboard.data.output",
    "PoolingRequestOutput": "pegboard.data.output",
}

__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from pegboard.config.schema import EngineConfig
    from pegboard.data.output import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from pegboard.data.pooling_params import PoolingParams
    from pegboard.data.request import LoRARequest
    from pegboard.data.sampling_params import (
        BeamSearchParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from pegboard.front.async_llm import AsyncLLM
    from pegboard.front.llm import LLM


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'pegboard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
