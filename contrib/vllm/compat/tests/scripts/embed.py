"""Usage: --model MODEL. Print vectors of prompts."""

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
    prompts = ["Hello, my name is", "The capital is"]
    for prompt, output in zip(prompts, llm.embed(prompts)):
        embedding = output.outputs.embedding
        assert len(embedding) == output.outputs.hidden_size == 32
        print(f"{prompt!r}: {embedding[:4]}")


if __name__ == "__main__":
    main(parse_args())
