"""How well documents answer a query: a cross-encoder reads both together.

python examples/offline/score.py [--model MODEL]
"""

import argparse

from pegboard import LLM

QUERY = "What is the capital of France?"
DOCUMENTS = ["The capital of Brazil is Brasilia.", "The capital of France is Paris."]


def run(llm: LLM) -> None:
    outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    for document, output in zip(DOCUMENTS, outputs, strict=True):
        print(f"{output.outputs.score:.4f} {document}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="cross-encoder/ms-marco-MiniLM-L-6-v2")
    with LLM(parser.parse_args().model) as llm:
        run(llm)


if __name__ == "__main__":
    main()
