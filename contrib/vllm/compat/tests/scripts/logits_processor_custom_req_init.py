"""Usage: MODEL. An adapter that looks at the engine's configuration, in another process."""

import asyncio
import sys

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor


class WrappedPerReqLogitsProcessor(AdapterLogitsProcessor):
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self.is_cuda = device.type == "cuda"
        self.last = vllm_config.model_config.get_vocab_size() - 5

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        if self.is_cuda:
            return None

        def only_last(prompt_ids, output_ids, logits: torch.Tensor) -> torch.Tensor:
            logits[: self.last] = float("-inf")
            logits[self.last + 1 :] = float("-inf")
            return logits

        return only_last


async def main() -> None:
    args = AsyncEngineArgs(model=sys.argv[1], logits_processors=[WrappedPerReqLogitsProcessor])
    engine = AsyncLLM.from_engine_args(args)
    try:
        params = SamplingParams(max_tokens=3)
        async for output in engine.generate("Hello", params, "first"):
            ids = output.outputs[0].token_ids
    finally:
        engine.shutdown()
    assert len(set(ids)) == 1


if __name__ == "__main__":
    asyncio.run(main())
