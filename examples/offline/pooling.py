"""What a model makes of prompts, as arrays: `encode`, which `embed`, `classify` and `score`
call. The vectors of a decoder need `runner="pooling"`.

python examples/offline/pooling.py [--model MODEL]
"""

import argparse

from pegboard import LLM, PoolingParams

PROMPTS = ["Hello, my name is", "The capital of France is"]


def run(llm: LLM) -> None:
    for use_activation in (True, False):
        params = PoolingParams(use_activation=use_activation)
        outputs = llm.encode(PROMPTS, params, pooling_task="embed", use_tqdm=False)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            vector = output.outputs.data
            length = float((vector**2).sum() ** 0.5)
            print(
                f"{prompt!r}: {len(output.prompt_token_ids)} tokens, "
                f"{len(vector)} numbers, length {length:.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    with LLM(parser.parse_args().model, runner="pooling") as llm:
        run(llm)


if __name__ == "__main__":
    main()
