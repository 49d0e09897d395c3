"""Rewards of answers: the value of a model with one class, without an activation.

python examples/offline/reward.py [--model MODEL]
"""

import argparse

from pegboard import LLM, PoolingParams

QUESTION = "What is 2 + 2?"
ANSWERS = ["4", "5", "I do not know."]


def run(llm: LLM) -> None:
    texts = [f"{QUESTION} {answer}" for answer in ANSWERS]
    params = PoolingParams(use_activation=False)
    outputs = llm.encode(texts, params, pooling_task="classify", use_tqdm=False)
    for answer, output in zip(ANSWERS, outputs, strict=True):
        print(f"{answer!r}: reward {output.outputs.data[0]:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="OpenAssistant/reward-model-deberta-v3-base")
    with LLM(parser.parse_args().model) as llm:
        run(llm)


if __name__ == "__main__":
    main()
