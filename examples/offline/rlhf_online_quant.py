"""A trainer's checkpoints have float weights, and the engine quantizes them while it loads them, at
the start and at each update.

python examples/offline/rlhf_online_quant.py --model FOLDER --trained FOLDER
"""

import argparse

from pegboard import LLM, SamplingParams

PROMPT = "The capital of France is"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--trained", required=True, help="new weights of the same model")
    parser.add_argument("--quantization", default="rtn_int8")
    words = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(words.model, quantization=words.quantization) as llm:
        for folder in (words.model, words.trained, words.model):
            llm.update_weights(folder)
            (output,) = llm.generate(PROMPT, params, use_tqdm=False)
            print(f"{folder}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
