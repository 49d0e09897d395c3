"""Usage: --model CLASSES. Print the probabilities of classes."""

from argparse import Namespace

from vllm import LLM, EngineArgs
from vllm.utils import FlexibleArgumentParser


def parse_args() -> Namespace:
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(runner="pooling", enforce_eager=True)
    return parser.parse_args()


def main(args: Namespace) -> None:
    llm = LLM(**vars(args))
    prompts = ["Hello, my name is", "The capital is"]
    for prompt, output in zip(prompts, llm.classify(prompts)):
        probs = output.outputs.probs
        assert len(probs) == 3 and abs(sum(probs) - 1) < 1e-4
        print(f"{prompt!r}: {probs} (size={len(probs)})")


if __name__ == "__main__":
    main(parse_args())
