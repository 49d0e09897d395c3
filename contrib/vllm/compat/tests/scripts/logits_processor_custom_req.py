"""Usage: MODEL. A logits processor of single requests, in the form of an adapter."""

import sys

import torch
from vllm import LLM, SamplingParams
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

logger = init_logger(__name__)


class DummyPerReqLogitsProcessor:
    def __init__(self, target_token: int) -> None:
        self.target_token = target_token

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        value = logits[self.target_token + len(output_ids)].item()
        logits[:] = float("-inf")
        logits[self.target_token + len(output_ids)] = value
        return logits


class WrappedPerReqLogitsProcessor(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        target = params.extra_args and params.extra_args.get("target_token")
        if target is None:
            return None
        if not isinstance(target, int):
            logger.warning("target_token %s is not an integer", target)
            return None
        return DummyPerReqLogitsProcessor(target)


if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], logits_processors=[WrappedPerReqLogitsProcessor])
    params = [
        SamplingParams(temperature=0.0, max_tokens=3, extra_args={"target_token": 30}),
        SamplingParams(temperature=0.0, max_tokens=3),
    ]
    outputs = llm.generate(["Hello, my name is", "The capital is"], params)
    assert outputs[0].outputs[0].token_ids == [30, 31, 32]
