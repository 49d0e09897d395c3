"""Usage: MODEL. Ask two questions about one long table."""

import sys
import time

from vllm import LLM, SamplingParams

TABLE = "| ID | Name | Age |\n" + "".join(f"| {i} | Person {i} | {20 + i} |\n" for i in range(6))


def timed(llm: LLM, params: SamplingParams, prompt: str) -> None:
    start = time.time()
    output = llm.generate(prompt, sampling_params=params)
    print(f"{output[0].outputs[0].text!r} took {time.time() - start} seconds.")


llm = LLM(model=sys.argv[1], enable_prefix_caching=True)
params = SamplingParams(temperature=0, max_tokens=2)
timed(llm, params, TABLE + "Question: how old is Person 1?")
timed(llm, params, TABLE + "Question: how old is Person 2?")
llm.reset_prefix_cache()
