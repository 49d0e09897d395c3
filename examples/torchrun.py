"""Offline generation on ranks that torchrun starts. Every rank runs this program.

torchrun --nproc-per-node 2 examples/torchrun.py
"""

import os
import sys

from pegboard import LLM, SamplingParams

PROMPTS = ["The capital of France is", "A paged KV cache is", "Water boils at"]


def main() -> None:
    llm = LLM(
        sys.argv[1] if sys.argv[1:] else None,
        tensor_parallel_size=int(os.environ["WORLD_SIZE"]),
        distributed_executor_backend="external_launcher",
    )
    greedy = SamplingParams(temperature=0, max_tokens=16)
    drawn = SamplingParams(temperature=1, max_tokens=16)  # without a seed: ranks draw alike
    for output in llm.generate(PROMPTS, [greedy, greedy, drawn]):
        line = f"rank {os.environ['RANK']}: {output.prompt!r} -> {output.outputs[0].text!r}\n"
        print(line, end="")  # written at once, so that ranks do not break each other's lines


if __name__ == "__main__":
    main()
