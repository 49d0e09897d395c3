"""Pegboard as a side: side_pegboard.py MODEL [SETTING=JSON …]."""

from __future__ import annotations

import json
import sys
import time

from serving import serve
from step_shares import measure_shares

from pegboard import LLM, SamplingParams


def main() -> None:
    settings = {
        name: json.loads(value)
        for name, value in (argument.split("=", 1) for argument in sys.argv[2:])
    }
    llm = LLM(sys.argv[1], **settings)

    def params(max_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> None:
        outputs = llm.generate(prompts, [params(count) for count in max_tokens], use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == max_tokens

    def stream(prompt: list[int], max_tokens: int) -> list[float]:
        engine = llm.llm_engine
        times = []
        engine.add_request("stream", prompt, params(max_tokens))
        while engine.has_unfinished_requests():
            if engine.step():
                times.append(time.perf_counter())
        assert len(times) == max_tokens
        return times

    serve(
        generate,
        stream,
        {"shares": lambda job: measure_shares(llm, job["prompts"], job["max_tokens"])},
    )


if __name__ == "__main__":
    main()
