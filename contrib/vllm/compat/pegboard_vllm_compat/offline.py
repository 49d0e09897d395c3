"""LLM and LLMEngine with the arguments of vLLM's that Pegboard's do not take."""

from __future__ import annotations

from typing import Any

import pegboard
from pegboard import PoolingRequestOutput, env
from pegboard_vllm_compat.engine_args import of_args, settings_of
from pegboard_vllm_compat.processors import with_processors


class PoolingOutput(list[float]):
    """The numbers of one prompt. vLLM has them as the tensor `data`."""

    @property
    def data(self) -> Any:
        """A float32 tensor [numbers]."""
        import torch

        return torch.tensor(list(self))


class LLM(pegboard.LLM):
    """`pegboard.LLM`, which also takes every field of EngineArgs."""

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        super().__init__(model, **with_processors(settings_of(settings), model, elsewhere=False))

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

    def encode(self, *args: Any, **more: Any) -> list[PoolingRequestOutput[Any]]:
        """See `pegboard.LLM.encode`. The numbers are also there as `outputs.data`, a tensor."""
        outputs: list[PoolingRequestOutput[Any]] = super().encode(*args, **more)
        for output in outputs:
            output.outputs = PoolingOutput(output.outputs)
        return outputs


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
