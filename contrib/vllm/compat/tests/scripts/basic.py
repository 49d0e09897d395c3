"""Usage: MODEL. Complete four prompts."""

import sys

from vllm import LLM, SamplingParams

prompts = ["Hello, my name is", "The president is", "The capital is", "The future is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4)


def main() -> None:
    llm = LLM(model=sys.argv[1])
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        assert output.finished and output.outputs[0].token_ids
    assert [output.prompt for output in outputs] == prompts


if __name__ == "__main__":
    main()
