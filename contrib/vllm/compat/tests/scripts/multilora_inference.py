"""Usage: MODEL ADAPTER_1 ADAPTER_2. Requests with different adapters through an LLMEngine."""

import sys

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest

model, first, second = sys.argv[1:]


def create_test_prompts():
    greedy = SamplingParams(temperature=0.0, logprobs=1, max_tokens=4)
    sampled = SamplingParams(n=2, temperature=0.8, max_tokens=4)
    return [
        ("A robot may not injure a human being", greedy, None),
        ("[user] Write a SQL query [/user]", greedy, LoRARequest("sql-1", 1, first)),
        ("[user] Write a SQL query [/user]", sampled, LoRARequest("sql-2", 2, second)),
    ]


def process_requests(engine: LLMEngine, prompts) -> list[RequestOutput]:
    request_id = 0
    finished = []
    while prompts or engine.has_unfinished_requests():
        if prompts:
            prompt, params, lora = prompts.pop(0)
            engine.add_request(str(request_id), prompt, params, lora_request=lora)
            request_id += 1
        for output in engine.step():
            if output.finished:
                finished.append(output)
                print(output.request_id, [one.text for one in output.outputs])
    return finished


def main() -> None:
    args = EngineArgs(model=model, enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2)
    engine = LLMEngine.from_engine_args(args)
    assert len(process_requests(engine, create_test_prompts())) == 3


if __name__ == "__main__":
    main()
