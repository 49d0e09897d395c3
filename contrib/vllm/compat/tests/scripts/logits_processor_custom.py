"""Usage: MODEL. A logits processor of the whole batch, which forces the tokens of some requests."""

import sys
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class DummyLogitsProcessor(LogitsProcessor):
    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        target: Any | None = params.extra_args and params.extra_args.get("target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token {target} is not an integer")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        def extract(params: SamplingParams, prompt: Any, output: Any) -> int | None:
            self.validate_params(params)
            return params.extra_args and params.extra_args.get("target_token")

        process_dict_updates(self.req_info, batch_update, extract)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.req_info:
            return logits
        rows = torch.tensor(list(self.req_info), device=logits.device)
        columns = torch.tensor(list(self.req_info.values()), device=logits.device)
        values = logits[rows, columns].clone()
        logits[rows] = float("-inf")
        logits[rows, columns] = values
        return logits


prompts = ["Hello, my name is", "The president is", "The capital is", "The future is"]
params = [
    SamplingParams(temperature=0.0, max_tokens=3, extra_args={"target_token": 128}),
    SamplingParams(temperature=0.0, max_tokens=3),
    SamplingParams(temperature=0.0, max_tokens=5, extra_args={"target_token": 67}),
    SamplingParams(temperature=0.0, max_tokens=3),
]
if __name__ == "__main__":
    expected = [one.outputs[0].token_ids for one in LLM(sys.argv[1]).generate(prompts, params[1])]
    llm = LLM(model=sys.argv[1], logits_processors=[DummyLogitsProcessor], max_num_seqs=2)
    outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert outputs[0] == [128] * 3 and outputs[2] == [67] * 5
    assert (outputs[1], outputs[3]) == (expected[1], expected[3])
    wrong = SamplingParams(extra_args={"target_token": "many"})
    try:
        llm.generate("Hello", wrong)
    except ValueError as error:
        assert "many is not an integer" in str(error)
    else:
        raise AssertionError("the parameters were not checked")
