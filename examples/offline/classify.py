"""Probabilities of a model's classes for texts.

python examples/offline/classify.py [--model MODEL]
"""

import argparse

from pegboard import LLM

MODEL = "distilbert/distilbert-base-uncased-finetuned-sst-2-english"
TEXTS = ["The movie was great fun.", "I want my money back.", "It is a film."]


def run(llm: LLM) -> None:
    for text, output in zip(TEXTS, llm.classify(TEXTS, use_tqdm=False), strict=True):
        probs = output.outputs.probs
        shown = ", ".join(f"{probability:.3f}" for probability in probs)
        print(f"{text!r}: class {probs.index(max(probs))} of [{shown}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    with LLM(parser.parse_args().model) as llm:
        run(llm)


if __name__ == "__main__":
    main()
