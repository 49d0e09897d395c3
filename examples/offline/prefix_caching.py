"""Prompts with the same beginning, with and without the prefix cache: the texts are the same.

python examples/offline/prefix_caching.py [--model MODEL]
"""

import argparse

from pegboard import LLM, SamplingParams

PREFIX = (
    "You are an expert school principal, skilled in managing staff. Draft questions for a "
    "potential new teacher of the first grade. They should ask for experience, patience and humor. "
)
PROMPTS = [PREFIX + end for end in ("The first question is", "The last question is", "Dear")]


def texts_of(model: str | None, *, enable_prefix_caching: bool) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(model, enable_prefix_caching=enable_prefix_caching) as llm:
        llm.generate(PROMPTS[0], params, use_tqdm=False)  # fills the cache
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    print("cached tokens:", [output.num_cached_tokens for output in outputs])
    return [output.outputs[0].text for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    model = parser.parse_args().model
    without = texts_of(model, enable_prefix_caching=False)
    cached = texts_of(model, enable_prefix_caching=True)
    for text in cached:
        print(repr(text))
    print("the same texts:", without == cached)


if __name__ == "__main__":
    main()
