"""vLLM for CPU as a side: side_vllm.py DIRECTORY DTYPE. Runs under vLLM's own Python."""

from __future__ import annotations

import sys
import time
from typing import Any

from serving import serve
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


def main() -> None:
    llm: Any = LLM(sys.argv[1], dtype=sys.argv[2], disable_log_stats=True)

    def params(max_tokens: int) -> Any:
        return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> None:
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = llm.generate(inputs, [params(count) for count in max_tokens], use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == max_tokens

    def stream(prompt: list[int], max_tokens: int) -> list[float]:
        engine, times = llm.llm_engine, []
        engine.add_request("stream", TokensPrompt(prompt_token_ids=prompt), params(max_tokens))
        while engine.has_unfinished_requests():
            if engine.step():
                times.append(time.perf_counter())
        return times

    serve(generate, stream)


if __name__ == "__main__":
    main()
