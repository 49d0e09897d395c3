"""Usage: MODEL FOLDER. Profile some steps."""

import os
import sys

os.environ["VLLM_TORCH_PROFILER_DIR"] = sys.argv[2]

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], tensor_parallel_size=1)
    llm.start_profile()
    llm.generate(["Hello, my name is"], SamplingParams(temperature=0.8, max_tokens=2))
    llm.stop_profile()
    assert os.listdir(sys.argv[2])
