"""Completions of several prompts with sampling parameters of their own, two answers each for one.

python examples/offline/generate.py [--model MODEL]
"""

import argparse

from pegboard import LLM, SamplingParams

PROMPTS = ["Hello, my name is", "The capital of France is", "The future of AI is"]
PARAMS = [
    SamplingParams(n=2, temperature=0.8, top_p=0.95, max_tokens=16, seed=1),
    SamplingParams(temperature=0, max_tokens=16),
    SamplingParams(temperature=0.8, top_k=5, max_tokens=16, stop=["."], seed=1),
]


def run(llm: LLM) -> None:
    for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False):
        print(f"{output.prompt!r}")
        for completion in output.outputs:
            print(f"  -> {completion.text!r} ({completion.finish_reason})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    with LLM(parser.parse_args().model) as llm:
        run(llm)


if __name__ == "__main__":
    main()
