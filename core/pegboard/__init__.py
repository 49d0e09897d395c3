"""Pegboard: LLM inference and serving made of plugins.

    from pegboard import LLM, SamplingParams

Every name below is imported on first use, so `import pegboard` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "LLM": "pegboard.llm",
    "AsyncLLM": "pegboard.async_llm",
    "SamplingParams": "pegboard.sampling_params",
    "StructuredOutputsParams": "pegboard.sampling_params",
    "RequestOutputKind": "pegboard.sampling_params",
    "BeamSearchParams": "pegboard.sampling_params",
    "PoolingParams": "pegboard.pooling_params",
    "EngineConfig": "pegboard.config",
    "CompletionOutput": "pegboard.output",
    "RequestOutput": "pegboard.output",
    "Logprob": "pegboard.output",
}

__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from pegboard.async_llm import AsyncLLM
    from pegboard.config import EngineConfig
    from pegboard.llm import LLM
    from pegboard.output import CompletionOutput, Logprob, RequestOutput
    from pegboard.pooling_params import PoolingParams
    from pegboard.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'pegboard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
