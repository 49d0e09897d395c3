"""Usage: --model MODEL. Add requests and make steps by hand."""

import argparse

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

prompts = [
    ("A robot may not", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
    ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
    ("What is the meaning?", SamplingParams(n=2, temperature=0.8, top_p=0.95)),
]


def main(args: argparse.Namespace) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    waiting = list(prompts)
    request_id = finished = 0
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, params = waiting.pop(0)
            engine.add_request(str(request_id), prompt, params)
            request_id += 1
        for output in engine.step():
            finished += output.finished
    assert finished == 3
    engine.add_request("gone", "This is aborted", SamplingParams(max_tokens=50))
    engine.step()
    engine.abort_request(["gone"])
    assert not engine.has_unfinished_requests()


if __name__ == "__main__":
    parser = FlexibleArgumentParser(description="Demo of LLMEngine")
    main(EngineArgs.add_cli_args(parser).parse_args())
