"""Usage: --model SCORES. Score one text against two others."""

from argparse import Namespace

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse_args() -> Namespace:
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(runner="pooling", enforce_eager=True)
    return parser.parse_args()


def main(args: Namespace) -> None:
    llm = LLM(**vars(args))
    texts = ["The capital of Brazil is Brasilia.", "The capital of France is Paris."]
    outputs = llm.score("What is the capital of France?", texts)
    assert len(outputs) == 2
    for text, output in zip(texts, outputs):
        print(f"{text!r}: {output.outputs.score}")


if __name__ == "__main__":
    main(parse_args())
