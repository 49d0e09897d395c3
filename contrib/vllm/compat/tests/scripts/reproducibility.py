"""Usage: MODEL. Two engines with one seed give the same texts."""

import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams

prompts = ["Hello, my name is", "The capital is"]
params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8, seed=42)


def texts() -> list[str]:
    llm = LLM(model=sys.argv[1], seed=42)
    return [output.outputs[0].text for output in llm.generate(prompts, params)]


if __name__ == "__main__":
    first = texts()
    print(first)
    assert first == texts()
