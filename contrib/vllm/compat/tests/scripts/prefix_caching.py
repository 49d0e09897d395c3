"""Usage: MODEL. The same answers with and without a cached prefix."""

import sys

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

prefix = "You are an expert school principal. You write questions for an interview. " * 2
prompts = [prefix + end for end in ("Hello, my name is", "The capital is")]
params = SamplingParams(temperature=0.0, max_tokens=4)


def main() -> None:
    regular = LLM(model=sys.argv[1], gpu_memory_utilization=0.4, enable_prefix_caching=False)
    expected = [output.outputs[0].text for output in regular.generate(prompts, params)]
    del regular
    cleanup_dist_env_and_memory()
    llm = LLM(model=sys.argv[1], enable_prefix_caching=True, gpu_memory_utilization=0.4)
    llm.generate(prompts[0], params)
    outputs = llm.generate(prompts, params)
    assert [output.outputs[0].text for output in outputs] == expected
    print("cached tokens:", [output.num_cached_tokens for output in outputs])
    assert all(output.num_cached_tokens for output in outputs)


if __name__ == "__main__":
    main()
