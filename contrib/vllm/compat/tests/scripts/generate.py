"""Usage: --model MODEL --max_tokens 5. Complete prompts with the settings of flags."""

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def create_parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(max_model_len=64)
    sampling = parser.add_argument_group("Sampling parameters")
    sampling.add_argument("--max-tokens", type=int)
    sampling.add_argument("--temperature", type=float)
    return parser


def main(args: dict) -> None:
    max_tokens = args.pop("max_tokens")
    temperature = args.pop("temperature")
    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    if max_tokens is not None:
        sampling_params.max_tokens = max_tokens
    if temperature is not None:
        sampling_params.temperature = temperature
    outputs = llm.generate(["Hello, my name is", "The capital is"], sampling_params)
    for output in outputs:
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        assert len(output.outputs[0].token_ids) <= 5


if __name__ == "__main__":
    main(vars(create_parser().parse_args()))
