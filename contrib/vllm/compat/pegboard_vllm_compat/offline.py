"""LLM and LLMEngine with the arguments of vLLM's that Pegboard's do not take."""

from __future__ import annotations

from typing import Any

import pegboard
from pegboard import PoolingRequestOutput, env
from pegboard.errors import RequestError
from pegboard_vllm_compat.engine_args import of_args, settings_of
from pegboard_vllm_compat.io_interface import make_io_processor, params_of
from pegboard_vllm_compat.processors import with_processors


class PoolingOutput:
    """The numbers of one prompt. array: float32, of one dimension, or of two with a row for each
    token."""

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def data(self) -> Any:
        """A tensor of them, as in vLLM."""
        import torch

        return torch.from_numpy(self._array)


class LLM(pegboard.LLM):
    """`pegboard.LLM`, which also takes every field of EngineArgs."""

    def __init__(
        self, model: str | None = None, *, io_processor_plugin: str | None = None, **settings: Any
    ) -> None:
        super().__init__(model, **with_processors(settings_of(settings), model, elsewhere=False))
        self.io_processor = None
        if io_processor_plugin is not None:
            self.io_processor = make_io_processor(
                io_processor_plugin, model, settings.get("tokenizer")
            )

    @classmethod
    def from_engine_args(cls, args: Any) -> "LLM":
        """Return an LLM with the settings of an EngineArgs."""
        return cls(**of_args(args))

    def chat(
        self, messages: Any, *args: Any, chat_template_content_format: str = "auto", **more: Any
    ) -> Any:
        """See `pegboard.LLM.chat`. The form of contents is always that which the template needs."""
        if chat_template_content_format != "auto":
            raise ValueError(
                f"chat_template_content_format={chat_template_content_format!r} is not supported: "
                "contents have the form that the template needs; leave it out"
            )
        names = ("sampling_params", "use_tqdm", "lora_request", "chat_template")
        return super().chat(messages, **dict(zip(names, args, strict=False)), **more)

    def start_profile(self, path: str | None = None) -> None:
        """Start the profiler. path: the folder that it writes to; default: that of
        VLLM_TORCH_PROFILER_DIR. Raises ValueError without either."""
        folder = path or env.vllm_variables().get("VLLM_TORCH_PROFILER_DIR")
        if not folder:
            raise ValueError("start_profile needs the environment variable VLLM_TORCH_PROFILER_DIR")
        super().start_profile(folder)

    def encode(
        self, prompts: Any, pooling_params: Any = None, **more: Any
    ) -> list[PoolingRequestOutput[Any]]:
        """See `pegboard.LLM.encode`. `outputs.data` is a tensor. A mapping with the key "data" is
        for the IO processor, which makes prompts of it, and one output of theirs."""
        if isinstance(prompts, dict) and "data" in prompts:
            return self._processed(prompts, pooling_params, **more)
        if more.get("pooling_task") == "plugin":
            raise RequestError('the pooling task "plugin" needs a prompt {"data": …}')
        outputs: list[PoolingRequestOutput[Any]] = super().encode(prompts, pooling_params, **more)
        for output in outputs:
            output.outputs = PoolingOutput(output.outputs.data)
        return outputs

    def _processed(
        self, request: Any, pooling_params: Any, *, pooling_task: str | None = None, **more: Any
    ) -> list[PoolingRequestOutput[Any]]:
        """Return the one output of the IO processor."""
        processor = self.io_processor
        if processor is None:
            raise RequestError(
                'a prompt {"data": …} needs an IO processor: make the LLM with io_processor_plugin'
            )
        prompts = processor.pre_process(processor.parse_request(request))
        params = params_of(processor, pooling_params)
        task = None if pooling_task == "plugin" else pooling_task
        outputs = self.encode(prompts, params, pooling_task=task, **more)
        counts = [output.num_cached_tokens for output in outputs]
        cached = sum(count for count in counts if count is not None)
        return [PoolingRequestOutput("", processor.post_process(outputs), [], cached)]


class LLMEngine:
    """An engine whose steps the script makes. It has the methods of `LLM.llm_engine`."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    @classmethod
    def from_engine_args(cls, args: Any, **more: Any) -> "LLMEngine":
        """Return an engine with the settings of an EngineArgs. Nothing else of vLLM's arguments has
        an effect."""
        return cls(LLM.from_engine_args(args))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm.llm_engine, name)
