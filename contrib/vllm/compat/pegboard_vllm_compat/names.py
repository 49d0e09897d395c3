"""Which names the package `vllm` has here: module → name → where the object lives. The names are
those of vLLM 0.13, as its scripts import them."""

from __future__ import annotations

from collections.abc import Mapping

_HERE = "pegboard_vllm_compat"


def _of(home: str, *names: str) -> dict[str, str]:
    return {name: f"{home}:{name}" for name in names}


_OUTPUTS = {
    **_of(
        "pegboard",
        "RequestOutput",
        "CompletionOutput",
        "PoolingRequestOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "ClassificationOutput",
        "ClassificationRequestOutput",
        "ScoringOutput",
        "ScoringRequestOutput",
    ),
    **_of(f"{_HERE}.offline", "PoolingOutput"),
}
_PROMPTS = _of(
    f"{_HERE}.prompts",
    "PromptType",
    "SingletonPrompt",
    "TextPrompt",
    "TokensPrompt",
    "EmbedsPrompt",
)
_SAMPLING = _of(
    "pegboard",
    "SamplingParams",
    "BeamSearchParams",
    "StructuredOutputsParams",
    "RequestOutputKind",
)
_ARGS = _of(f"{_HERE}.engine_args", "EngineArgs", "AsyncEngineArgs")
_PARSER = _of(f"{_HERE}.arguments", "FlexibleArgumentParser")
_ENGINE = _of(f"{_HERE}.offline", "LLMEngine")
_ASYNC = {
    "AsyncLLM": f"{_HERE}.online:AsyncLLM",
    "AsyncLLMEngine": f"{_HERE}.online:AsyncLLM",
}
_LOGITS = _of(
    f"{_HERE}.logits_interface",
    "LogitsProcessor",
    "BatchUpdate",
    "MoveDirectionality",
    "AdapterLogitsProcessor",
    "RequestLogitsProcessor",
)
_TOOLS = {
    **_of(f"{_HERE}.parser_interface", "ToolParser"),
    "ToolParserManager": f"{_HERE}.parser_interface:ToolParsers",
}
_REASONING = {
    **_of(f"{_HERE}.parser_interface", "ReasoningParser"),
    "ReasoningParserManager": f"{_HERE}.parser_interface:ReasoningParsers",
}
_PROTOCOL = _of(
    f"{_HERE}.protocol",
    "ChatCompletionRequest",
    "ChatCompletionToolsParam",
    "DeltaFunctionCall",
    "DeltaMessage",
    "DeltaToolCall",
    "ExtractedToolCallInformation",
    "FunctionCall",
    "ToolCall",
)
_IO_PROTOCOL = _of(f"{_HERE}.io_interface", "IOProcessorRequest", "IOProcessorResponse")
_TOKENIZER = _of(f"{_HERE}.functions", "AnyTokenizer", "TokenizerLike")
_CLEANUP = _of(f"{_HERE}.functions", "cleanup_dist_env_and_memory")

MODULES: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        **_of(f"{_HERE}.offline", "LLM"),
        **_ENGINE,
        "AsyncLLMEngine": _ASYNC["AsyncLLMEngine"],
        **_ARGS,
        "SamplingParams": _SAMPLING["SamplingParams"],
        **_of("pegboard", "PoolingParams"),
        **_OUTPUTS,
        **{name: _PROMPTS[name] for name in ("PromptType", "TextPrompt", "TokensPrompt")},
        **_of(f"{_HERE}.functions", "__version__", "__version_tuple__"),
    },
    "vllm.entrypoints.llm": _of(f"{_HERE}.offline", "LLM"),
    "vllm.entrypoints.chat_utils": {
        **_of(f"{_HERE}.functions", "ChatCompletionMessageParam"),
        "make_tool_call_id": f"{_HERE}.protocol:random_tool_call_id",
    },
    "vllm.sampling_params": _SAMPLING,
    "vllm.pooling_params": _of("pegboard", "PoolingParams"),
    "vllm.lora.request": _of("pegboard", "LoRARequest"),
    "vllm.lora.resolver": _of(
        f"{_HERE}.resolver_interface", "LoRAResolver", "LoRAResolverRegistry"
    ),
    "vllm.outputs": _OUTPUTS,
    "vllm.inputs": _PROMPTS,
    "vllm.inputs.data": _PROMPTS,
    "vllm.logprobs": _of("pegboard", "Logprob"),
    "vllm.sequence": _of("pegboard", "Logprob"),
    "vllm.engine.arg_utils": _ARGS,
    "vllm.engine.llm_engine": _ENGINE,
    "vllm.engine.async_llm_engine": {"AsyncLLMEngine": _ASYNC["AsyncLLMEngine"]},
    "vllm.v1.engine.llm_engine": _ENGINE,
    "vllm.v1.engine.async_llm": {"AsyncLLM": _ASYNC["AsyncLLM"]},
    "vllm.plugins.io_processors.interface": _of(f"{_HERE}.io_interface", "IOProcessor"),
    "vllm.entrypoints.pooling.pooling.protocol": _IO_PROTOCOL,
    "vllm.v1.metrics.loggers": {
        "StatLoggerBase": f"{_HERE}.stat_interface:StatLogger",
        "StatLoggerFactory": f"{_HERE}.stat_interface:StatLoggerFactory",
    },
    "vllm.v1.metrics.stats": _of(
        f"{_HERE}.stat_interface",
        "FinishedRequestStats",
        "IterationStats",
        "MultiModalCacheStats",
        "PrefixCacheStats",
        "PromptTokenStats",
        "SchedulerStats",
    ),
    "vllm.v1.spec_decode.metrics": _of(f"{_HERE}.stat_interface", "SpecDecodingStats"),
    "vllm.v1.metrics.reader": {
        **_of("pegboard.data.output", "Counter", "Gauge", "Histogram", "Vector"),
        "Metric": "pegboard.data.output:MetricValue",
    },
    "vllm.tool_parsers": _TOOLS,
    "vllm.tool_parsers.abstract_tool_parser": _TOOLS,
    "vllm.entrypoints.openai.tool_parsers": _TOOLS,
    "vllm.entrypoints.openai.tool_parsers.abstract_tool_parser": _TOOLS,
    "vllm.entrypoints.openai.protocol": {**_PROTOCOL, **_IO_PROTOCOL},
    "vllm.entrypoints.openai.engine.protocol": _PROTOCOL,
    "vllm.entrypoints.openai.chat_completion.protocol": _PROTOCOL,
    "vllm.reasoning": _REASONING,
    "vllm.reasoning.abs_reasoning_parsers": _REASONING,
    "vllm.reasoning.basic_parsers": _of(f"{_HERE}.parser_interface", "BaseThinkingReasoningParser"),
    "vllm.tokenizers": {"TokenizerLike": _TOKENIZER["TokenizerLike"]},
    "vllm.transformers_utils.tokenizer": {"AnyTokenizer": _TOKENIZER["AnyTokenizer"]},
    "vllm.v1.sample.logits_processor": _LOGITS,
    "vllm.v1.sample.logits_processor.interface": _LOGITS,
    "vllm.v1.sample.logits_processor.builtin": _of(
        f"{_HERE}.logits_interface", "process_dict_updates"
    ),
    "vllm.utils": {**_PARSER, **_of(f"{_HERE}.functions", "random_uuid")},
    "vllm.utils.argparse_utils": _PARSER,
    "vllm.logger": _of(f"{_HERE}.functions", "init_logger"),
    "vllm.distributed": _CLEANUP,
    "vllm.distributed.parallel_state": _CLEANUP,
    "vllm.config": _of(
        f"{_HERE}.configs",
        "AttentionConfig",
        "CompilationConfig",
        "KVEventsConfig",
        "KVTransferConfig",
        "PoolerConfig",
        "SpeculativeConfig",
        "StructuredOutputsConfig",
        "VllmConfig",
    ),
}

ABSENT: Mapping[str, str] = {
    "vllm.assets": "its images and sounds are downloaded from vLLM's servers; open a local file",
    "vllm.sampling_params.GuidedDecodingParams": (
        "vLLM removed it in 0.12; use StructuredOutputsParams(json=…)"
    ),
    "vllm.ModelRegistry": "models are plugins of Pegboard: see docs/plugins.md",
    "vllm.v1.metrics.loggers.PrometheusStatLogger": "the metrics plugin prometheus runs anyway",
    "vllm.v1.metrics.loggers.LoggingStatLogger": "the metrics plugin log runs anyway",
    "vllm.model_executor": "models and layers are plugins of Pegboard: see docs/plugins.md",
    "vllm.platforms": "platforms are plugins of Pegboard: pegboard plugins list --kind platform",
    "vllm.multimodal.MULTIMODAL_REGISTRY": "processors are plugins of Pegboard",
    "vllm.initialize_ray_cluster": "use distributed_executor_backend='ray'",
}
"""Names that vLLM has, or had, and that are not here → why, or what to use instead."""
