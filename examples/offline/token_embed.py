"""A vector of each token of a prompt, and how similar two texts are by them, as ColBERT compares.

python examples/offline/token_embed.py [--model MODEL]
"""

import argparse

from pegboard import LLM
from pegboard.data.similarity import similarity

TEXTS = ["The capital of France", "Paris is the capital of France.", "It rains in Oslo."]


def run(llm: LLM) -> None:
    outputs = llm.encode(TEXTS, pooling_task="token_embed", use_tqdm=False)
    query = outputs[0].outputs.data
    for text, output in zip(TEXTS, outputs, strict=True):
        rows = output.outputs.data
        best = similarity(query, rows) / len(query)
        print(f"{text!r}: {len(rows)} tokens, {rows.shape[1]} numbers each, similarity {best:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    with LLM(parser.parse_args().model, runner="pooling") as llm:
        run(llm)


if __name__ == "__main__":
    main()
