"""The same texts twice: requests with a seed, in any order, and with batch invariance also in
batches of any size.

python examples/offline/reproducibility.py [--model MODEL]
"""

import argparse

from pegboard import LLM, SamplingParams

PROMPTS = ["Hello, my name is", "The capital of France is", "The future of AI is"]


def run(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12, seed=42)
    together = llm.generate(PROMPTS, params, use_tqdm=False)
    alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in reversed(PROMPTS)]
    for first, second in zip(together, reversed(alone), strict=True):
        same = first.outputs[0].token_ids == second.outputs[0].token_ids
        print(f"{first.outputs[0].text!r} the same: {same}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    with LLM(parser.parse_args().model, seed=42, batch_invariant=True) as llm:
        run(llm)


if __name__ == "__main__":
    main()
